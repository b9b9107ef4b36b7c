"""Does the work of other programs: pays invoices, and greets. Ends on SIGTERM, after the task that it is at.

    python worker.py URL
"""

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from latchwork import Failed, Latchwork, Task


def pay(task: Task) -> dict:
    amount = task.input["input"]["amount"]
    if amount <= 0:
        return {"outcome": "rejection", "message": "the amount is not positive", "field": "amount"}
    # The bank gets task.key as its idempotency key, so a second attempt does not pay twice.
    return {"output": {"receipt": f"py-{task.input['entity']['id']}"}, "data": {"amount": amount}}


def greet(task: Task) -> str:
    # For a step of a workflow, the input of the workflow is in "input".
    name = task.input["input"] if isinstance(task.input, dict) else task.input
    if not name:
        raise Failed("there is no name to greet", retryable=False)
    return f"Hello, {name}!"


worker = Latchwork(sys.argv[1]).worker({"pay": pay, "greet": greet}, lease=5, concurrency=2, name="worker.py")
signal.signal(signal.SIGTERM, lambda *_: worker.stop())
print("working", flush=True)
worker.run()
