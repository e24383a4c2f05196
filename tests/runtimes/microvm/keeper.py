"""What a guest has in memory and on its disk, as its test knows it too: pages and blocks that say which they are and
when they were written."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

PAGE = 4096
PAGES = 4096
BLOCKS = 1024
_LENGTHS = (1, 2, 7, 8, 15, 16, 17, 64, 256, 300)


def writes(seed: int, among: int) -> Iterator[tuple[int, int, int]]:
    """Where, how many and what: 0 is zeros."""
    dice = random.Random(f"{seed} {among}")
    for _ in range(dice.randrange(1, 12)):
        length = dice.choice(_LENGTHS)
        yield dice.randrange(among - length), length, 0 if dice.random() < 0.15 else seed


def content(number: int, version: int) -> bytes:
    return bytes(PAGE) if version == 0 else struct.pack("<QQ", number, version) * (PAGE // 16)


def version(number: int, data: bytes) -> int:
    """-1: none that was ever written there."""
    if data == bytes(PAGE):
        return 0
    _, found = struct.unpack_from("<QQ", data)
    return int(found) if data == content(number, found) else -1


GUEST = """
import mmap, os
held = mmap.mmap(-1, PAGES * PAGE)
disk = os.open("/root/data", os.O_RDWR | os.O_CREAT)
os.ftruncate(disk, BLOCKS * PAGE)
os.fsync(disk)
os.mkfifo("/run/ask"); os.mkfifo("/run/told")

def step(seed):
    for first, count, what in writes(seed, PAGES):
        held[first * PAGE : (first + count) * PAGE] = b"".join(content(first + i, what) for i in range(count))
    for first, count, what in writes(seed, BLOCKS):
        os.pwrite(disk, b"".join(content(first + i, what) for i in range(count)), first * PAGE)
    os.fsync(disk)
    if seed % 3 == 0:
        taken = os.urandom(6 << 20)  # and given back: to the guest's kernel, and by that to the host
        del taken
    return "done"

def check():
    os.sync()
    open("/proc/sys/vm/drop_caches", "w").write("3")
    memory = [version(number, held[number * PAGE : (number + 1) * PAGE]) for number in range(PAGES)]
    blocks = [version(number, os.pread(disk, PAGE, number * PAGE)) for number in range(BLOCKS)]
    return " ".join(map(str, memory + blocks))

while True:
    word, _, seed = open("/run/ask").read().strip().partition(" ")
    said = step(int(seed)) if word == "step" else check()
    open("/run/told", "w").write(said)
"""


def program() -> str:
    """For a guest's Python."""
    with open(__file__) as file:
        ours = file.read().partition('GUEST = """')[0].partition("\n\n")[2]
    return "from __future__ import annotations\n" + ours.replace("from __future__ import annotations\n", "") + GUEST
