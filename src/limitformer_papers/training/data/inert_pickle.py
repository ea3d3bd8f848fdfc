r"""A pickle read as data: what it names is never looked up, called or built.

Python's own reader looks names up and calls them. Even with NumPy's names alone that is enough to read memory outside
the file: the state of a dtype may claim one byte for 3,072. Here opcodes fill plain containers, and an object stays a
record of how it would be made.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MARK = object()
LITERALS = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE",
    "BINBYTES", "SHORT_BINBYTES",
)  # fmt: skip
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict, "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple, "MARK": lambda: MARK,
}  # fmt: skip
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Named:
    """A name that a pickle asks for."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """An object that a pickle would make: the function, its arguments, and the state it would be given."""

    function: Named
    arguments: tuple[Any, ...]
    state: Any = None


class Inert:
    """The stack and the memory of a pickle; one method for each kind of opcode."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def above_mark(self) -> list[Any]:
        """Take what lies above the last mark."""
        place = len(self.stack) - 1 - self.stack[::-1].index(MARK)
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def take(self, number: int) -> list[Any]:
        """Take the last `number`."""
        if number > len(self.stack):
            raise ValueError("it takes more than it has")
        items = self.stack[len(self.stack) - number :]
        del self.stack[len(self.stack) - number :]
        return items

    def extend(self, items: list[Any]) -> None:
        """Put items into the list on top."""
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to what is no list")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Put keys and values into the dictionary on top."""
        if not isinstance(self.stack[-1], dict):
            raise ValueError("it sets items of what is no dictionary")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def make(self) -> None:
        """Note a call."""
        function, arguments = self.take(2)
        if not (isinstance(function, Named) and isinstance(arguments, tuple)):
            raise ValueError("it calls what is no name")
        self.stack.append(Made(function, arguments))

    def name(self) -> None:
        """Note a name whose parts are on the stack."""
        module, name = self.take(2)
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("it asks for a name that is no text")
        self.stack.append(Named(module, name))

    def build(self) -> None:
        """Note a state."""
        (state,) = self.take(1)
        if not isinstance(self.stack[-1], Made):
            raise ValueError("it gives a state to what has none")
        self.stack[-1].state = state


def pushes_new(new: Callable[[], Any]) -> Callable[[Inert, Any], Any]:
    """A step that puts a new constant on the stack."""
    return lambda pickle, _: pickle.stack.append(new())


def pushes_tuple(count: int) -> Callable[[Inert, Any], Any]:
    """A step that makes a tuple of what is on top of the stack."""
    return lambda pickle, _: pickle.stack.append(tuple(pickle.take(count)))


STEPS: dict[str, Callable[[Inert, Any], Any]] = {
    **dict.fromkeys(LITERALS, lambda pickle, value: pickle.stack.append(value)),
    **{name: pushes_new(new) for name, new in CONSTANTS.items()},
    **{name: pushes_tuple(count) for name, count in TUPLES.items()},
    **dict.fromkeys(("PROTO", "FRAME"), lambda pickle, _: None),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda pickle, k: pickle.memory.update({k: pickle.stack[-1]})),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda pickle, k: pickle.stack.append(pickle.memory[k])),
    "MEMOIZE": lambda pickle, _: pickle.memory.update({len(pickle.memory): pickle.stack[-1]}),
    "TUPLE": lambda pickle, _: pickle.stack.append(tuple(pickle.above_mark())),
    "APPEND": lambda pickle, _: pickle.extend(pickle.take(1)),
    "APPENDS": lambda pickle, _: pickle.extend(pickle.above_mark()),
    "SETITEM": lambda pickle, _: pickle.set_items(pickle.take(2)),
    "SETITEMS": lambda pickle, _: pickle.set_items(pickle.above_mark()),
    "GLOBAL": lambda pickle, name: pickle.stack.append(Named(*name.split(" ", 1))),
    "STACK_GLOBAL": lambda pickle, _: pickle.name(),
    "REDUCE": lambda pickle, _: pickle.make(),
    "BUILD": lambda pickle, _: pickle.build(),
}


def read(content: bytes, known: frozenset[Named]) -> Any:
    """What a pickle holds, objects as `Made`; `known` are the names that it may ask for.

    Raises:
        ValueError: another name, an opcode that plain data have no use for, or a damaged pickle; other errors of the
            kind that damaged data raise.
    """
    pickle = Inert()
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "STOP":
            return pickle.take(1)[0]
        if opcode.name not in STEPS:
            raise ValueError(f"it has the opcode {opcode.name}, which no such file needs")
        STEPS[opcode.name](pickle, argument)
        top = pickle.stack[-1] if pickle.stack else None
        if isinstance(top, Named) and top not in known:
            raise ValueError(f"it asks for {top.module}.{top.name}, which no such file needs")
    raise ValueError("it has no end")
