"""The code interpreter's server, as it runs inside a sandbox: HTTP on one side, Jupyter kernels on the other.

It is copied into the template as it is. Python's own library, `tornado` and `jupyter_client` (which
brings `tornado`) are all it may import; nothing of the rest of Sandyard is there.

One process serves. A *context* is a language, a working directory and a kernel; its executions queue.
A context outlives its kernel: one that dies is told to whoever waits for it and is replaced.
"""
