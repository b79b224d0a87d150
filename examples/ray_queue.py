"""Ray places the workers, Arena moves the steps. Extra: ``ray``; start it with `python examples/ray_queue.py`.

The engine is the driver. Where Ray's scheduler puts a worker is Ray's affair: the handle goes to it as an argument, and
`create_from_handle` finds out whether it shares memory with the engine or has to come over the network. So it works on
one machine, where all of them share memory, and as a job of a cluster.
"""

import ray

from arena import Handle, MessageQueue, QueueConfig

WORKERS = 2
STEPS = 5


@ray.remote(num_cpus=1)
class Worker:
    """One reader, in a process of Ray's."""

    def __init__(self, handle: Handle, rank: int) -> None:
        self._queue = MessageQueue.create_from_handle(handle, rank)

    def work(self) -> tuple[str, int]:
        """Take steps until there are no more: how they came, and the sum of what was in them."""
        total = 0
        with self._queue as queue:
            while (step := queue.dequeue(timeout=60)) is not None:
                total += sum(step["tokens"])
            return type(queue).__name__, total


def main(address: str | None = None) -> list[tuple[str, int]]:
    """Run the engine; what each worker answers.

    Args:
        address: this host's, where workers on others connect to; by default the one by which Ray's nodes know it.
    """
    address = address or ray.util.get_node_ip_address()
    with MessageQueue(WORKERS, config=QueueConfig(name="ray-steps"), remote=address) as queue:
        workers = [Worker.remote(queue.export_handle(), rank) for rank in range(WORKERS)]
        answers = [worker.work.remote() for worker in workers]
        queue.wait_until_ready(timeout=120)
        for step in range(STEPS):
            queue.enqueue({"step": step, "tokens": list(range(1000))})
        queue.enqueue(None)
        return ray.get(answers, timeout=120)


if __name__ == "__main__":
    ray.init()  # the cluster of RAY_ADDRESS, or a new one on this machine
    for how, total in main():
        print(f"{how}: {total}")
