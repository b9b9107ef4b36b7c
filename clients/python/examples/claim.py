"""Pays an invoice once, however many programs try.

    python claim.py URL INVOICE AMOUNT
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from latchwork import Latchwork, Problem

url, invoice, amount = sys.argv[1:4]
try:
    paid = Latchwork(url).fire("invoice", "pay", invoice, input={"amount": int(amount)}, requester="admin")
    print(f"paid: {paid['from']} -> {paid['to']}, receipt {paid['output']['receipt']}")
except Problem as problem:
    if problem.code not in ("claimed", "not-permitted"):
        raise
    print(f"not paid here: {problem.code}")
