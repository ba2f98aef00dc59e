"""Worker processes, seen from the runner."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any


class Worker:
    """A worker process in a session of its own: Ctrl-C reaches it through the runner alone."""

    def __init__(self, threads: int) -> None:
        count = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "topk_studies.engine.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **count},
            start_new_session=True,
        )

    def ask(self, job: dict[str, Any], progress: Callable[[float, str], None]) -> dict[str, Any]:
        """Have a job done; a worker that dies of it answers with an error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                answer = json.loads(line)
                if "progress" not in answer:
                    return answer
                progress(*answer["progress"])
        except BrokenPipeError:
            pass
        return {"error": f"its process ended with status {self.process.wait()} (a negative one is a signal: 9 is the "
                "system's, for want of memory)"}  # fmt: skip

    def interrupt(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
