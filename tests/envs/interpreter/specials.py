"""Pieces of programs that tell an interpreter from CPython; the generator strews them in."""

from __future__ import annotations

from tests.envs.interpreter.programs import add_specials

SOURCE = """
def acc(x, into=[]):
    into.append(x)
    return into
acc(1)
print(acc(@I))

base = @I
def late(x, y=base):
    return x + y
base = 1000
print(late(1))

total = @I
def local():
    print(total)
    total = 5
try:
    local()
except UnboundLocalError as e:
    print(e)

def outer(n):
    def inner(k):
        return k + n
    n = n * 2
    return inner(n)
print(outer(@I))

def make(n):
    return lambda x: x + n + base2
base2 = 1
add = make(@I)
base2 = 100
print(add(1))

def counter():
    state = [0]
    def bump():
        state[0] += 1
        return state[0]
    return bump
bump = counter()
bump()
print(bump(), counter()())

def fact(n):
    return 1 if n <= 1 else n * fact(n - 1)
print(fact(10))

def fib(n, memo={}):
    if n in memo:
        return memo[n]
    if n < 2:
        return n
    memo[n] = fib(n - 1, memo) + fib(n - 2, memo)
    return memo[n]
print(fib(30))

def walk(n):
    def go(k):
        if k == 0:
            return [n]
        return walk(n - 1) + go(k - 1) if n > 0 else go(k - 1)
    return go(2)
print(walk(2))

class Point:
    '''A point.'''
    kind = 'point'
    def __init__(self, x, y=2):
        self.x = x
        self.y = y
    def move(self, dx):
        self.x += dx
        return self
    def __repr__(self):
        return f'Point({self.x}, {self.y})'
    def __eq__(self, other):
        return self.x == other.x
    def __lt__(self, other):
        return self.x < other.x
p = Point(@I)
print(p, p.move(2).x, Point.kind, p == Point(3), sorted([Point(3), Point(1)]), Point)
print(type(p), isinstance(p, Point), [p])

class Base:
    def sum(self):
        return 'method'
class Child(Base):
    def len(self):
        return sum([1, 2]) + len('abc')
print(Child().len(), Child().sum(), sum([1]), len('xy'))

class Oops(ValueError):
    pass
try:
    raise Oops('bad', 1)
except ValueError as e:
    print(type(e), e, e.args)

class Node:
    def __init__(self, value):
        self.value = value
        self.next = None
head = None
for v in @L:
    n = Node(v)
    n.next = head
    head = n
out = []
while head:
    out.append(head.value)
    head = head.next
print(out)

class Wrong:
    def f(self, a):
        return a
try:
    Wrong().f()
except TypeError as e:
    print(e)
try:
    Wrong().f(1, 2)
except TypeError as e:
    print(e)
try:
    Wrong(1)
except TypeError as e:
    print(e)

def calls(order):
    order.append(len(order))
    return len(order)
seen = []
box = [0] * 10
box[calls(seen)] += calls(seen)
box[calls(seen)], box[calls(seen)] = calls(seen), calls(seen)
print(box, seen, {calls(seen): calls(seen)}, (calls(seen), calls(seen)))

def early(xs):
    for x in xs:
        try:
            if x > 2:
                return x
            continue
        except:
            print('never')
        finally:
            print('after', x)
    return None
print(early([1, 2, 3, 4]))

def swallow():
    try:
        1 / 0
    finally:
        return 'swallowed'
print(swallow())

def nothing(x):
    x = x + 1
print(nothing(1), nothing(@I) is None)

def maybe(x):
    if x > 1:
        return 'big'
    elif x == 1:
        y = 'one'
print(maybe(0), maybe(1), maybe(2))

def last(xs):
    for x in xs:
        x * 2
print(last([1, 2]), (lambda: 5)())

funcs = []
for k in range(3):
    funcs.append(lambda: k)
print([f() for f in funcs])

funcs = [lambda: k for k in range(3)]
print([f() for f in funcs])

funcs = [lambda k=k: k for k in range(3)]
print([f() for f in funcs])

g = (x * 2 for x in [1, 2, 3])
print(next(g), list(g), list(g))

src = [1, 2, 3]
g = (x + len(src) for x in src)
src = [10, 20]
print(list(g))

print([[x * y for x in range(3)] for y in range(3)], [y for x in [[1, 2], [3]] for y in x])

print({x: [y for y in range(x)] for x in range(3)}, {(a, b) for a in 'ab' for b in 'ab'} == set())

print(sorted([(2, 'b'), (1, 'z'), (2, 'a')], key=lambda t: (-t[0], t[1])))

print([sum(x * r for x in (1, 2)) for r in (1, 2)], [sorted('cab', key=lambda c: (c == s, c)) for s in 'abc'])

print({1, 2, 3, 100, 50}, {'a', 'e', 'i', 'o', 'u'}, {64, 0, 8, 16, 24, 32}, {5, 5.0, True, 1})

print({-1, -2, 33, 65, 97}, {(1, 2), (3, 4), (5, 6)}, set([1, 2, 3, 100, 50]), {*[1, 2, 3, 100, 50], 7})

a = @L
a[1:1] = [9, 9]
del a[0]
print(a, a[-1:], a * 2, a == a[:], a is None)

a, (b, *c) = 1, (2, 3, 4)
print(a, b, c)

[a, b] = [1, 2]
print(a, b)

first, *others = @L
print(first, others)

x = 5
def shadow(x):
    x += 1
    return x
print(shadow(x), x, shadow(x=x))

def keyword(a, b=2, *args, c=3, **more):
    return a, b, args, c, more
print(keyword(1), keyword(1, 2, 3, 4), keyword(1, c=5, d=6), keyword(b=1, a=2))

def starred(*numbers):
    return sum(numbers)
print(starred(), starred(1, 2), starred(*[1, 2, 3]), max(*[4, 5]))

def only(a, /, b, *, c):
    return a + b + c
print(only(1, 2, c=3), only(1, b=2, c=3))
only(1, 2)

print(*[1, 2, 3], sep=', ')
print(*'abc')
print()

print([1, 2, 3].index(5))

print({'a': 1}['b'])

print('abc'[5])

print(undefined + 1)

print(int('x'))

print(None + 1)

print([] + (1,))

print(sorted([1, 'a']))

undefined_function(1)

None.method()

'abc'.missing()

assert 1 == 2

assert 1 == 2, 'message'

raise ValueError

raise ValueError('text')

raise SystemExit

import math
print(math.nothing)

import os
print(os.getcwd() != '')

x: int = 5
y: 'text' = 6
print(x, y)

def typed(a: int, b: list = None) -> str:
    return str(a) + str(b)
print(typed(1), typed(1, [2]))

total = 0
while True:
    total += 1
    if total == 3:
        continue
    if total > 5:
        break
print(total)

for i in range(3):
    for j in range(3):
        if j == 1:
            break
        print(i, j)
print(i, j)

for i in []:
    pass
else:
    print('else')

text = 'The quick brown fox'
print(' '.join(w[::-1] for w in text.split()), text.lower().count('o'), text.partition(' '))

counts = {}
for ch in 'mississippi':
    counts[ch] = counts.get(ch, 0) + 1
print(sorted(counts.items(), key=lambda kv: (-kv[1], kv[0])), max(counts, key=counts.get))

d = defaultdict(list)
for a, b in [(1, 2), (1, 3), (2, 4)]:
    d[a].append(b)
print(d, dict(d), Counter('hello').most_common(2), Counter(a=1) + Counter(a=2))

q = deque([1, 2, 3], maxlen=3)
q.append(4)
q.appendleft(0)
print(q, q.popleft(), list(q))

h = [5, 1, 4]
heapq.heapify(h)
print(heapq.heappop(h), heapq.heappushpop(h, 0), heapq.nsmallest(2, h), h)

print(re.findall(r'(\\d+)-(\\w+)', '12-ab 3-c'), re.split(r'[,;]', 'a,b;c'), re.sub('a', 'b', 'banana', count=1))
print(re.search(r'\\d+', 'abc123').group(), re.search('x', 'abc') is None, re.compile('a+').findall('aaba'))

print(list(itertools.permutations([1, 2, 3], 2)), list(itertools.product('ab', [1, 2])))
print([(k, list(g)) for k, g in itertools.groupby('aabbb')], list(itertools.zip_longest([1], [2, 3])))

print(functools.reduce(lambda a, b: a * b, [1, 2, 3, 4]), functools.partial(pow, 2)(5))
print(sorted([3, 1, 2], key=functools.cmp_to_key(lambda a, b: b - a)))

print(list(map(lambda a, b: a + b, [1, 2], [3, 4])), list(filter(lambda x: x > 1, [1, 2, 3])), list(zip([1, 2], 'ab')))

lam = lambda x, *args, y=1: x + y + len(args)
print(lam(1), lam(1, 2, 3, y=4))
lam()

def rec(n):
    return rec(n + 1)
try:
    rec(0)
except RecursionError:
    print('deep')

def sum(a, b):
    return a * b
print(sum(2, 3))

def use():
    return max([1, 5, 2])
print(use())
max = 3
print(max)
try:
    use()
except TypeError as e:
    print(e)

list = [1, 2]
print(list)
print(list((1, 2)))

e = 'kept'
try:
    1 / 0
except ZeroDivisionError as e:
    pass
try:
    print(e)
except NameError as gone:
    print(gone)

def gone():
    try:
        1 / 0
    except ZeroDivisionError as err:
        pass
    return err
try:
    gone()
except UnboundLocalError as x:
    print(x)

it = iter([1, 2])
print(next(it), next(it), next(it, 'end'))
next(it)

try:
    next(iter([]))
except StopIteration:
    print('stopped')

print([next(iter([])) for _ in range(1)])

print(list(next(iter([])) for _ in range(1)))

try:
    pass
except:
    print('no')
else:
    print('else')
finally:
    print('finally')

for i in range(3):
    try:
        if i == 1:
            break
    finally:
        print('f', i)

try:
    try:
        raise KeyError('k')
    except ValueError:
        print('no')
    finally:
        print('inner')
except LookupError as e:
    print('outer', e, e.args)

try:
    raise SystemExit(3)
except:
    print('caught')

try:
    raise SystemExit(3)
except Exception:
    print('not caught')

print(1 < 2 < 3, 3 > 2 > 2, 1 == 1 != 2, [] == [] in [[[]]], not 1 < 2)

print(0 or [] or 'x', 1 and '' and 2, None or 0, (1 and 2) or 3)

print(7 // -2, -7 % 3, 2 ** -1, 5 / 2, 1e16 + 1, 0.1 + 0.2, 10 ** 20, True + True, round(2.5), round(-1.5), 7 % -3)

print(f'{3.14159:.2f} {42:05d} {"x":>3} {True} {None} {[1, "a"]} {1 + 1} {"q"!r:>5} {{}}')

print('%5.1f|%-5s|%x' % (3.14159, 'ab', 255), '{:>5}|{:<5}|{:^5}'.format(1, 2, 3), '{0}{1}{0}'.format('a', 'b'))

n = @I
print('even' if n % 2 == 0 else 'odd', (n > 0) - (n < 0), bool(n), str(n).zfill(4), hex(abs(n)), oct(8))

matrix = [[1, 2], [3, 4]]
print([list(r) for r in zip(*matrix)], [sum(r) for r in matrix], matrix[1][0], [row[::-1] for row in matrix])

dp = [[0] * 4 for _ in range(4)]
for i in range(1, 4):
    for j in range(1, 4):
        dp[i][j] = max(dp[i - 1][j], dp[i][j - 1]) + i * j
print(dp[3][3], dp)

@functools.lru_cache
def cached(n):
    return n
print(cached(1))

def gen():
    yield 1
print(list(gen()))

def glob():
    global total
    total = 9
glob()
print(total)

if (n := 5) > 3:
    print(n)

class P:
    @property
    def x(self):
        return 7
print(P().x)

class B:
    def __init__(self):
        self.v = 1
class C(B):
    def __init__(self):
        super().__init__()
print(C().v)

with open('/dev/null') as fh:
    print(fh.read())

print(eval('1 + 1'))

print([x for x in range(3)], x if 'x' in dir() else 'none')

print((lambda f: f(f, 5))(lambda f, n: 1 if n == 0 else n * f(f, n - 1)))

compose = lambda f, g: lambda x: f(g(x))
print(compose(lambda x: x + 1, lambda x: x * 2)(5))

def apply(f, *args):
    return f(*args)
print(apply(max, 1, 2), apply(len, 'abc'), apply(lambda: 0))

fns = {'add': lambda a, b: a + b, 'mul': lambda a, b: a * b}
print(fns['add'](2, 3), fns['mul'](2, 3), [abs, len][1]('ab'))

s = set()
s.add(3)
s.update([1, 2])
s.discard(9)
print(s, s - {1}, s & {2, 3}, s ^ {3, 4}, s.issubset({1, 2, 3}), frozenset([1]))
s.remove(99)

t = (1, 2, 3)
t[0] = 5

t = ([],)
try:
    t[0] += [1]
except TypeError as e:
    print(e)
print(t)

l = [1]
l += (2, 3)
l += 'ab'
l *= 2
print(l)

a = b = []
a.append(1)
print(b, a is b if False else '', id(a) == id(b))

x = 10
def reads():
    return x
def hides():
    x = 20
    return reads()
print(reads(), hides())

def deep():
    a = 1
    def mid():
        b = a + 1
        def low():
            return a + b
        return low
    f = mid()
    a = 10
    return f()
print(deep())

print(str.upper('a'), list.__len__([1]) if False else 0, ''.join(['a']), dict.fromkeys('ab', 0), int.bit_length(5))

print(min('b', 'a'), max([3, 1], [2, 9]), sum([[1], [2]], []), sum((0.1, 0.2)), max({'a': 1, 'b': 0}, key=lambda k: k))

print(any([]), all([]), sorted('hello', reverse=True), list(reversed([1, 2])), list(enumerate('ab', 1)))

print(bool(''), int('12', 3), int(3.9), float('inf'), str(1.0), complex(1, 2), chr(97), ord('a'), bytes([65]), b'x')

print(isinstance(True, int), isinstance([], (list, tuple)), issubclass(bool, int), callable(len), type(1) is int)

try:
    int([])
except (TypeError, ValueError) as e:
    print(e)

try:
    [].pop()
except IndexError as e:
    print(e)

try:
    {}.pop('a')
except KeyError as e:
    print(e, repr(e), str(e))

try:
    'a' + 1
except TypeError as e:
    print(e)

try:
    for x in 5:
        pass
except TypeError as e:
    print(e)

try:
    a, b = 1, 2, 3
except ValueError as e:
    print(e)

try:
    (1)(2)
except TypeError as e:
    print(e)

try:
    5()
except TypeError as e:
    print(e)

try:
    [1, 2]['a']
except TypeError as e:
    print(e)

try:
    len(1, 2)
except TypeError as e:
    print(e)

try:
    print(1, nothing=2)
except TypeError as e:
    print(e)

def named(a):
    return a
try:
    named(b=1)
except TypeError as e:
    print(e)
try:
    named(1, a=1)
except TypeError as e:
    print(e)

def outer_name():
    def inner_name(a):
        return a
    inner_name()
try:
    outer_name()
except TypeError as e:
    print(e)

class WithCall:
    def __call__(self, x):
        return x + 1
    def __len__(self):
        return 3
    def __getitem__(self, i):
        return i * 2
    def __contains__(self, x):
        return x == 1
    def __add__(self, other):
        return 'added'
    def __bool__(self):
        return False
w = WithCall()
print(w(1), len(w), w[4], 1 in w, w + 1, 'yes' if w else 'no', not w)

class Stack:
    def __init__(self):
        self.items = []
    def push(self, x):
        self.items.append(x)
    def pop(self):
        return self.items.pop()
    def empty(self):
        return not self.items
st = Stack()
st.push(1)
st.push(2)
print(st.pop(), st.empty(), st.items, st.push(3))

def is_prime(n):
    if n < 2:
        return False
    for d in range(2, int(n ** 0.5) + 1):
        if n % d == 0:
            return False
    return True
print([x for x in range(30) if is_prime(x)])

def bubble(xs):
    n = len(xs)
    for i in range(n):
        swapped = False
        for j in range(n - i - 1):
            if xs[j] > xs[j + 1]:
                xs[j], xs[j + 1] = xs[j + 1], xs[j]
                swapped = True
        if not swapped:
            break
    return xs
print(bubble(@L))

def merge(a, b):
    if not a or not b:
        return a or b
    return [a[0]] + merge(a[1:], b) if a[0] <= b[0] else [b[0]] + merge(a, b[1:])
print(merge([1, 3, 5], [2, 4]))
"""

add_specials(SOURCE)
