"""The back end `interpreter`: programs run in smolagents' AST interpreter, and what it would run wrong is refused."""

from sandyard.envs.interpreter.executor import Interpreter as Interpreter
from sandyard.envs.interpreter.guard import check as check
from sandyard.envs.interpreter.modules import DEFAULT_IMPORTS as DEFAULT_IMPORTS
from sandyard.envs.interpreter.refusal import Refusal as Refusal
from sandyard.envs.interpreter.result import InterpreterResult as InterpreterResult
