"""The end of a process that spoke through a native library waits for that library's threads.

The transport of the E2B SDK (pyqwest) and obstore hand an answer to the event loop from threads of their own,
by `loop.call_soon_threadsafe`, whose write to the loop's socket lets go of the interpreter's lock. A program
that ends on that answer may be finalizing before the thread has the lock again, and CPython before 3.14 ends
such a thread with `pthread_exit`: through native frames that is an abort. The program printed what it should
and yet died of SIGABRT, about one in a hundred on a busy machine.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from types import FrameType

_HANDOVER = "call_soon_threadsafe"
_LONGEST = 1.0  # seconds: a handover takes microseconds, so one that lasts is something else
_POLL = 0.001


def wait_for_handovers() -> None:
    """Return once no other thread hands something to an event loop, or after a second."""
    give_up = time.monotonic() + _LONGEST
    while _handovers() and time.monotonic() < give_up:
        time.sleep(_POLL)  # with the lock let go of, which is all that such a thread lacks


def _handovers() -> int:
    own = threading.get_ident()
    return sum(_hands_over(frame) for thread, frame in sys._current_frames().items() if thread != own)


def _hands_over(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _HANDOVER:
            return True
        frame = frame.f_back
    return False


# Those registered last run first: what other modules do at exit may still hand something over.
atexit.register(wait_for_handovers)
