"""Variables of a stage: ARG and ENV, and what their use in other instructions comes to.

Docker's reference, "Environment replacement" and "Scope" of ARG: an ENV always wins over an ARG of its name; an ARG
counts from its line on, and one before the first FROM counts in FROM lines only, unless a stage asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from e2b_dockerfile_utils import ShellLex, parse_words

from sandyard.images.dockerfile.syntax import DockerfileError

VALUE_LIMIT = 128 << 10  # characters, as of one argument of a command
_WORK_LIMIT = 4 << 20  # characters that one expansion may come to on its way
_PATTERN_VALUE = 256
# Known without an ARG, and in no cache key: Docker's "Predefined ARGs".
PREDEFINED = frozenset(
    name
    for plain in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for name in (plain, plain.lower())
)


class Scope:
    """`env` is the image's; `args` those that were declared so far and have a value."""

    def __init__(self, env: Mapping[str, str], escape: str) -> None:
        self.env = dict(env)
        self.args: dict[str, str] = {}
        self._escape = escape
        self._longest = max(map(len, self.env.values()), default=0)

    def set_env(self, name: str, value: str) -> None:
        self.env[name] = value
        self._longest = max(self._longest, len(value))

    def set_arg(self, name: str, value: str) -> None:
        self.args[name] = value
        self._longest = max(self._longest, len(value))

    def known(self) -> Mapping[str, str]:
        """What a command sees."""
        return {**self.args, **self.env}

    def expand(self, text: str, line: int) -> str:
        """One word: quotes go, variables are replaced. Raises `DockerfileError`."""
        return self._lex(text, line)[0]

    def words(self, text: str, line: int) -> Sequence[str]:
        """As `expand`; what variables hold is cut into words too."""
        return self._lex(text, line)[1]

    def expand_plain(self, text: str, line: int) -> str:
        """As `expand`, with quotes left as they are: the body of a heredoc."""
        self._check(text, line)
        lex = ShellLex(self._escape, skip_process_quotes=True, env=self.known(), skip_unset_env=False)
        return self._bounded(lex.process_word, text, line)

    def assignment(self, word: str, line: int) -> tuple[str, str | None]:
        """`NAME` or `NAME=value` of an ARG."""
        name, sign, value = word.partition("=")
        name = self.expand(name, line)
        if not name:
            raise DockerfileError(line, f"ARG '{word}' has no name")
        return name, self.expand(value, line) if sign else None

    def _lex(self, text: str, line: int) -> tuple[str, Sequence[str]]:
        if not any(mark in text for mark in ("$", "'", '"', self._escape, " ", "\t")):
            return text, [text] if text else []
        self._check(text, line)
        lex = ShellLex(self._escape, env=self.known(), skip_unset_env=False)
        return self._bounded(lex.process_word, text, line), lex.process_words(text)

    def _bounded(self, process: object, text: str, line: int) -> str:
        assert callable(process)
        try:
            found = str(process(text))
        except ValueError as error:
            raise DockerfileError(line, str(error)) from error
        if len(found) > max(VALUE_LIMIT, len(text)):
            raise DockerfileError(line, f"a value of {len(found)} characters, more than {VALUE_LIMIT}")
        return found

    def _check(self, text: str, line: int) -> None:
        """Before anything is computed: a few lines can ask for more than any machine has."""
        if len(text) + text.count("$") * self._longest > _WORK_LIMIT:
            raise DockerfileError(line, "its variables come to too much text")
        if (
            "${" in text
            and any(mark in text for mark in "/#%")
            and text.count("*")
            and (text.count("*") > 2 * text.count("${") or self._longest > 16 * _PATTERN_VALUE or text.count("*") > 8)
        ):
            raise DockerfileError(line, "patterns in '${…}' with that many '*', or over values that long")


def split_words(text: str, escape: str) -> Sequence[str]:
    """Words as they are written, quotes and all."""
    return parse_words(text, escape)
