"""The trusted program that judges a solution inside a verifier's sandbox. Standard library only.

What it holds against
    The solution and the assertions never share a process, a user id or a file. For every test one
    process (the *box*) holds the solution and another (the *judge*) runs the test; names the test
    takes from the solution are stand-ins that call over a socket. Arguments and results cross as
    plain data, so the only thing a solution can do to pass is to send the right data. The box is
    forked from a process that never read the tests, the expected values or the nonce. A verdict
    that is printed, an early exit, a patched builtin, a lying `__eq__`, a frame or memory that is
    searched, a killed parent: none of these reaches the judge.

What it does not hold against
    A solution whose own class the test compares with itself (`Point(1) == Point(1)`) answers its
    own comparison: that is what such a test asks. A test that evaluates a result as code runs it in
    the judge. What a test sees of the solution's output on stdout is nothing.

It is sent to the sandbox as source and started by `start.py`; nothing of it is read from a file.
"""
