"""The first lines of the runner, given to `python3 -I -c`: the program's modules follow on stdin."""

import json
import os
import struct
import sys
import types


def read_exactly(length: int) -> bytes:
    """Never a byte more: what follows on stdin must not lie in a buffer that is forked."""
    data = bytearray()
    while len(data) < length:
        chunk = os.read(0, length - len(data))
        if not chunk:
            raise SystemExit("stdin ended before the program was complete")
        data += chunk
    return bytes(data)


def start() -> None:
    (length,) = struct.unpack(">I", read_exactly(4))
    for name, source in json.loads(read_exactly(length)):
        module = types.ModuleType(name)
        sys.modules[name] = module
        if source is None:
            module.__path__ = []
        else:
            exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
    sys.modules["sandyard.verify.runner.main"].__dict__["main"]()


if __name__ == "__main__":
    start()
