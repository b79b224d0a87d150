"""Readers on other hosts: a process that reads the ring on their behalf and forwards, and what they have at their end.

*Who forwards.* One process beside the writer, the *forwarder*, not a thread of it: a thread would share the engine's
GIL and cost it up to a switch interval a message, and it would die with the engine, before the readers have what was
published. It holds one seat of the ring for each remote reader (`standin.StandIn`), and a seat's `consumed` moves when
the reader beyond it has taken the message. So back-pressure, lag and blame are the ring's own; the ring is also the
buffer from which is sent again, and nothing else has to be bounded. One seat for all of them would blame the group for
its slowest member.

*What travels.* Frames as they stand in the ring, and the blocks they name, straight out of the arena in pieces of
1 MiB. Pieces, because CURVE encrypts a message before it sends its first byte: of one piece of 200 MB, encryption, the
wire and decryption follow each other; of many, they overlap (measured: half the time), and a heartbeat never stands
behind seconds of payload. A reader grants a window of bytes, and what it has received it grants again.

*Never skipped, never twice.* Frames carry their sequence and an *epoch*. A connection keeps order, so whoever misses
something notices at the next message, a ping if no other; the epoch ends, and the next begins with the first frame that
was not taken. Of the last epoch nothing counts any more. What a reader asked for may be lost with its connection too:
it asks again whenever it hears that more was sent.

*What is said back.* A reader says what it took when that frees much, and else a few milliseconds later with what it
took by then: a message in the other direction wakes as many threads as the one it answers, on the way of the next.

*Who lives.* libzmq's own threads answer heartbeats, without the GIL: a reader that computes for minutes is alive, one
that is stopped, dead or beyond a broken link is not. A link that heals in time (`RemoteConfig.timeout_s`) is nobody's
death.

*Trust.* CURVE, with keys made for this queue alone: strangers are refused by the server's key and by theirs, before a
byte of theirs is looked at; then the queue's secret is compared. Only after that is anything unpickled, and with
``serializer="restricted"`` nothing ever is.

zmq is imported by what needs it alone, and never by ``import arena``.
"""
