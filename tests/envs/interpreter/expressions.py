"""Random expressions by type, over what solutions of MBPP use."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Sequence

INT, STR, BOOL, FLOAT, LIST, WORDS, DICT, SET, PAIR, PAIRS = range(10)  # in templates: ISBFLWDTPQ


class Expressions:
    """Makes expressions by type. Names in scope are kept with their type."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names: list[tuple[str, int]] = []
        self.functions: list[tuple[str, Sequence[int], int]] = []
        self.count = 0
        self.budget = 0

    # Small things

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, *options: str) -> str:
        return self.random.choice(options)

    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        if self.chance(0.04):
            return self.pick("sum", "max", "list", "str", "len", "min", "dict", "next", "id", "input")
        return f"{prefix}{self.count}"

    def variable(self, kind: int) -> str | None:
        found = [name for name, each in self.names if each == kind]
        return self.random.choice(found) if found else None

    def integer(self) -> str:
        return str(self.random.choice((0, 1, 2, 3, 4, 5, 7, 8, 10, 12, 17, 25, 64, 100, -1, -2, -5)))

    def word(self) -> str:
        return repr(self.pick("", "a", "ab", "abc", "hello", "Hello World", "python 3", "level", "x1y2", "aAbB", "é"))

    def expand(self, depth: int, *templates: str) -> str:
        """One of `templates`, its places filled: `@I` an int and so on, `@(…)` one of these texts."""
        chosen = self.random.choice(templates)
        one_of = re.sub(r"@\((.*?)\)", lambda found: str(self.random.choice(ast.literal_eval(f"({found[1]})"))), chosen)
        return re.sub(r"@(.)", lambda found: self.fill(found[1], depth), one_of)

    def fill(self, place: str, depth: int) -> str:
        if place == "w":
            return self.word()
        groups = {"?": tuple(range(10)), "c": (STR, LIST, DICT, SET, WORDS), "r": (LIST, PAIR, DICT)}
        kinds = groups.get(place) or ("ISBFLWDTPQ".index(place),)
        return self.of(self.random.choice(kinds), depth)

    # Expressions

    def of(self, kind: int, depth: int = 0) -> str:
        """An expression of type `kind`."""
        if depth > 3 or self.chance(0.25 + depth * 0.15):
            return self.variable(kind) or self.literal(kind)
        makers: dict[int, Callable[[int], str]] = {
            INT: self.int_of,
            STR: self.str_of,
            BOOL: self.bool_of,
            FLOAT: self.float_of,
            LIST: self.list_of,
            WORDS: self.words_of,
            DICT: self.dict_of,
            SET: self.set_of,
            PAIR: self.pair_of,
            PAIRS: self.pairs_of,
        }
        return makers[kind](depth + 1)

    def literal(self, kind: int) -> str:
        if kind == INT:
            return self.integer()
        if kind == STR:
            return self.word()
        if kind == BOOL:
            return self.pick("True", "False")
        if kind == FLOAT:
            return self.pick("0.5", "2.0", "1e3", "-1.25", "3.14")
        if kind == LIST:
            return "[" + ", ".join(self.integer() for _ in range(self.random.randint(0, 5))) + "]"
        if kind == WORDS:
            return "[" + ", ".join(self.word() for _ in range(self.random.randint(0, 4))) + "]"
        if kind == DICT:
            return "{" + ", ".join(f"{self.word()}: {self.integer()}" for _ in range(self.random.randint(0, 4))) + "}"
        if kind == SET:
            items = [self.integer() for _ in range(self.random.randint(1, 8))]
            return "{" + ", ".join(items) + "}" if self.chance(0.8) else f"set([{', '.join(items)}])"
        if kind == PAIR:
            return f"({self.integer()}, {self.word()})"
        return "[" + ", ".join(f"({self.integer()}, {self.word()})" for _ in range(self.random.randint(0, 4))) + "]"

    def int_of(self, d: int) -> str:
        calls = [f for f in self.functions if f[2] == INT]
        if calls and self.chance(0.25):
            return self.call_of(self.random.choice(calls), d)
        return self.expand(
            d,
            "(@I + @I)",
            "(@I - @I)",
            "(@I * @I)",
            "(@I // @I)",
            "(@I % @I)",
            "abs(@I)",
            "len(@c)",
            "sum(@L)",
            "max(@I, @I)",
            "min(@L or [0])",
            "max(@L, default=@I)",
            "(@I if @B else @I)",
            "@L[@('0', '-1', '1', '@I')]",
            "int(@I / 2)",
            "(@I & @I)",
            "(@I | @I)",
            "(@I ^ @I)",
            "(@I << 2)",
            "(-@I)",
            "(~@I)",
            "@S.count(@w)",
            "@L.index(@I)",
            "@S.find(@w)",
            "sum(x for x in @L if x % 2 == 0)",
            "sum(x * y for x in @L for y in @L)",
            "@D.get(@S, @I)",
            "@D[@S]",
            "ord(@S[0])",
            "round(@F)",
            "pow(@I, 2)",
            "int(str(@I))",
            "(lambda p, q=2: p * q)(@I)",
            "next((x for x in @L if x > @I), @I)",
            "divmod(@I, 3)[1]",
            "@P[0]",
            "sum(map(lambda t: t * 2, @L))",
            "sum(1 for _ in @S)",
            "(@B and @I or @I)",
            "reduce(lambda p, q: p + q, @L, @I)",
            "math.gcd(@I, @I)",
            "math.floor(@F)",
            "bisect.bisect(@L, @I)",
        )

    def str_of(self, d: int) -> str:
        return self.expand(
            d,
            "(@S + @S)",
            "@S.upper()",
            "@S[::-1]",
            "@S[@('1:', ':2', ':-1', '::2', '-3:')]",
            "(@S * 2)",
            "str(@I)",
            "','.join(@W)",
            "''.join(sorted(@S))",
            "''.join(c for c in @S if c not in 'aeiou')",
            "@S.replace(@w, @w)",
            "(lambda q, r: f'{q}-{r!r}')(@I, @S)",
            "(lambda q: f'{q:>4}|')(@I)",
            "(lambda q: f'{q:.2f}')(@F)",
            "'%s=%d' % (@S, @I)",
            "'{}/{}'.format(@S, @I)",
            "@S.strip()",
            "@S.title()",
            "re.sub(r'[aeiou]', '*', @S)",
            "re.sub(r'(\\w)', lambda g: g.group(1).upper(), @S)",
            "(bin(@I)[2:])",
            "chr(ord('a') + abs(@I) % 26)",
            "(@S if @B else @S)",
            "max(@W, key=len)",
            "@W[@('0', '-1')]",
            "repr(@r)",
            "@P[1]",
            "str(type(@?))",
            "string.ascii_lowercase[:5]",
        )

    def bool_of(self, d: int) -> str:
        return self.expand(
            d,
            "(@I < @I)",
            "(@I == @I)",
            "(@I <= @I <= @I)",
            "(@B and @B)",
            "(@B or @B)",
            "(not @B)",
            "(@I in @L)",
            "(@I not in @T)",
            "(@S in @S)",
            "all(x > 0 for x in @L)",
            "any(x == @I for x in @L)",
            "isinstance(@I, int)",
            "@S.isdigit()",
            "bool(re.match(r'^[a-z]+$', @S))",
            "(@S == @S[::-1])",
            "(@I is None)",
            "@T <= @T",
            "(@L < @L)",
            "(@I != @I)",
            *(["(@S < @I)"] if self.chance(0.1) else []),
            "type(@I) == type(@I)",
        )

    def float_of(self, d: int) -> str:
        return self.expand(
            d,
            "(@I / @I)",
            "(@F * 2)",
            "round(@F, 2)",
            "float(@I)",
            "math.sqrt(abs(@I))",
            "(@I ** 0.5)",
            "(math.pi * @I)",
            "abs(@F)",
            "(@F - @I)",
            "sum(@L) / len(@L)",
            "m.pow(@I, 2)",
            "sqrt(abs(@I))",
        )

    def list_of(self, d: int) -> str:
        calls = [f for f in self.functions if f[2] == LIST]
        if calls and self.chance(0.2):
            return self.call_of(self.random.choice(calls), d)
        return self.expand(
            d,
            "(@L + @L)",
            "sorted(@L)",
            "sorted(@L, reverse=True)",
            "sorted(@L, key=lambda x: -x)",
            "sorted(@L, key=lambda x: (x % 3, x))",
            "list(reversed(@L))",
            "@L[@('1:', ':2', '::-1', '::2', '-2:')]",
            "[x * 2 for x in @L]",
            "[x for x in @L if x > @I]",
            "[x + y for x in @L for y in @L]",
            "[x - y for x, y in zip(@L, @L)]",
            "[x if x > 0 else -x for x in @L]",
            "list(map(lambda x: x + @I, @L))",
            "list(filter(lambda x: x % 2, @L))",
            "list(range(@('3', '5', '1, 6', '10, 0, -3')))",
            "list(@T)",
            "sorted(@T)",
            "list(map(len, @W))",
            "[i for i, x in enumerate(@L) if x]",
            "[*@L, @I]",
            "[len(w) for w in @W]",
            "[p[0] for p in @Q]",
            "list(@D.values())",
            "heapq.nlargest(2, @L)",
            "[sum(t) for t in itertools.combinations(@L, 2)]",
            "list(itertools.accumulate(@L))",
            "[max(x, @I) for x in @L]",
            "[k for k, _ in itertools.groupby(@L)]",
            "list(chain(@L, @L))",
            "[[x, y] for x in @L for y in @L if x != y][0]",
            "[f(x) for f in [abs, lambda v: v + 1] for x in @L]",
        )

    def words_of(self, d: int) -> str:
        return self.expand(
            d,
            "@S.split()",
            "sorted(@W, key=len)",
            "sorted(@W, key=lambda w: (len(w), w))",
            "[w.upper() for w in @W]",
            "list(@S)",
            "[c for c in @S if c.isalpha()]",
            "re.findall(r'\\w+', @S)",
            "list(map(str, @L))",
            "sorted(@D)",
            "[f'{x}' for x in @L]",
            "[p[1] for p in @Q]",
            "@S.split(',')",
            "@S.split('l')",
            "list(filter(None, @W))",
            "[''.join(g) for _, g in groupby(@S)]",
        )

    def dict_of(self, d: int) -> str:
        return self.expand(
            d,
            "{w: len(w) for w in @W}",
            "dict(zip(@W, @L))",
            "dict(Counter(@S))",
            "{k: v + 1 for k, v in @D.items()}",
            "{k: v for k, v in sorted(@D.items(), key=lambda kv: kv[1])}",
            "dict(@D, extra=@I)",
            "{**@D, 'z': @I}",
            "{k: v for k, v in @D.items() if v > 1}",
            "dict(sorted(@D.items(), key=itemgetter(1)))",
        )

    def set_of(self, d: int) -> str:
        return self.expand(
            d,
            "set(@L)",
            "(@T | @T)",
            "(@T & @T)",
            "(@T - @T)",
            "{x % 5 for x in @L}",
            "@T.union(@L)",
            "{@I, @I}",
            "set(map(len, @W))",
        )

    def pair_of(self, d: int) -> str:
        return self.expand(
            d,
            "(@I, @S)",
            "max(@Q, key=lambda p: p[0])",
            "tuple([@I, @S])",
            "@Q[0]",
        )

    def pairs_of(self, d: int) -> str:
        return self.expand(
            d,
            "list(zip(@L, @W))",
            "sorted(@Q)",
            "sorted(@Q, key=lambda p: p[1])",
            "list(enumerate(@W))",
            "[(len(w), w) for w in @W]",
            "[p for p in @Q if p[0] > @I]",
            "[(b, a) for a, b in @D.items()]",
        )

    def call_of(self, function: tuple[str, Sequence[int], int], d: int) -> str:
        name, kinds, _ = function
        arguments = [self.of(kind, d) for kind in kinds]
        if self.chance(0.03):
            arguments.append("1")
        if arguments and self.chance(0.03):
            arguments.pop()
        if len(arguments) == len(kinds) and kinds and self.chance(0.15):
            arguments[-1] = f"p{len(kinds) - 1}={arguments[-1]}"
        return f"{name}({', '.join(arguments)})"
