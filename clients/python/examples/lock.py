"""Holds a lock while it works. Run it twice at the same time: the second one waits.

    python lock.py URL NAME
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from latchwork import Latchwork

url, name = sys.argv[1:3]
with Latchwork(url).lock(name, wait=60, lease=5) as held:
    print(f"token {held.token}: begin", flush=True)
    for _ in range(4):
        held.check()  # before each part of the work
        time.sleep(0.1)
    print(f"token {held.token}: end", flush=True)
