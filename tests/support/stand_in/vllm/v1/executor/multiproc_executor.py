"""Part of the stand-in: an executor that binds the queue's name at import, and workers that unpickle a handle first."""

import multiprocessing
import os
import traceback
from threading import Thread

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue


class WorkerProc:
    @staticmethod
    def worker_main(handle, rank, ready, end, environment):
        os.environ.update(environment)
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        try:
            requests = MessageQueue.create_from_handle(handle, rank)
            answers = MessageQueue(1, 1)
            ready.send(("READY", answers.export_handle()))
            requests.wait_until_ready()
            answers.wait_until_ready()
        except Exception as error:
            ready.send((f"{type(error).__name__}: {error}", None))
            return
        Thread(target=_watch, args=(end, requests, answers), daemon=True).start()
        try:
            while True:
                function, args = requests.dequeue(indefinite=True)
                try:
                    answers.enqueue(("SUCCESS", function(rank, *args)))
                except Exception:
                    answers.enqueue(("FAILURE", traceback.format_exc()))
        except RuntimeError as error:
            assert str(error) == "cancelled", error
        finally:
            requests.shutdown()
            answers.shutdown()


def _watch(end, *queues):
    end.wait()
    for queue in queues:
        queue.shutdown()


class MultiprocExecutor:
    def __init__(self, world, method, environment_of=lambda rank: {}):
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        context = multiprocessing.get_context(method)
        self.requests = MessageQueue(world, world, max_chunk_bytes=1 << 20, connect_ip="127.0.0.1")
        self.workers, readies = [], []
        self._end = context.Event()
        for rank in range(world):
            ready, ready_in = context.Pipe(duplex=False)
            args = (self.requests.export_handle(), rank, ready_in, self._end, environment_of(rank))
            worker = context.Process(target=WorkerProc.worker_main, args=args, daemon=True)
            worker.start()
            ready_in.close()
            self.workers.append(worker)
            readies.append(ready)
        self.answers = []
        for ready in readies:
            status, handle = ready.recv()
            if status != "READY":
                raise RuntimeError(status)
            self.answers.append(MessageQueue.create_from_handle(handle, 0))
        self.requests.wait_until_ready()
        for answers in self.answers:
            answers.wait_until_ready()

    def collective_rpc(self, function, *args, timeout=30.0):
        self.requests.enqueue((function, args))
        results = []
        for answers in self.answers:
            status, result = answers.dequeue(timeout=timeout)
            if status != "SUCCESS":
                raise RuntimeError(result)
            results.append(result)
        return results

    def shutdown(self):
        self._end.set()
        for worker in self.workers:
            worker.join(20)
        for queue in (self.requests, *self.answers):
            queue.shutdown()
