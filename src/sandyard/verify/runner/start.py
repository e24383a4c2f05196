"""The first lines of the runner, given to `python3 -I -c`: the program's modules follow on stdin."""

import marshal
import os
import struct
import sys
import types
import zlib


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
    """Load the modules and run. Their compiled form is used where it is of this Python's own kind."""
    tag_length, compiled_length, source_length = struct.unpack(">III", read_exactly(12))
    tag = read_exactly(tag_length)
    compiled, source = read_exactly(compiled_length), read_exactly(source_length)
    if tag.decode() == sys.implementation.cache_tag:
        program = marshal.loads(zlib.decompress(compiled))
    else:
        program = marshal.loads(zlib.decompress(source))
    for name, body in program:
        module = types.ModuleType(name)
        sys.modules[name] = module
        if body is None:
            module.__path__ = []
        else:
            code = compile(body, name, "exec", dont_inherit=True) if isinstance(body, str) else body
            exec(code, module.__dict__)
    sys.modules["sandyard.verify.runner.main"].__dict__["main"]()


if __name__ == "__main__":
    start()
