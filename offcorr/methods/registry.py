"""Registry of the methods: discovery, lookup by name, options and configurations."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import math
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from offcorr.correction import FIELDS, Correction, named
from offcorr.stages.base import Stage, stage_from_config
from offcorr.stages.checks import nearest, same_definition

__all__ = [
    "Method",
    "available",
    "catalogue",
    "file_of",
    "find",
    "from_config",
    "get",
    "illustration",
    "register",
    "resolve",
    "unregister",
]

_SLOTS = {
    "ratio": "ratio",
    "gate": "gate",
    "weight": "weight",
    "reject": "rejection",
    "advantages": "advantages",
}
_COMMON = ("aggregate", "max_length", "weight", "reject", "advantages", "count_rejected", "strict")


@dataclass(frozen=True)
class Method:
    """A named method: the function that builds its correction, and its description.

    Attributes:
        name, aliases: names under which ``offcorr.get`` finds it.
        build: function from keyword options to a Correction.
        multiplier: c_t in words or as a formula: dL/dlogp_t = -c_t w_t A_t / Z, with w_t the product of its weights.
        paper: arXiv id or name.
        provenance: where the formula was read: "official code", "framework code", "paper text", "notes by others
            about the paper" ...
        notes: one line on what is unpublished or where frameworks differ.
        on_policy: whether its gradient equals that of REINFORCE when the three policies agree.
        schedules: options that a trainer changes during training unless they are given, as
            {"start": ..., "end": ...}.
        example: values of the options that have no default, because no source gives them. They are an illustration,
            for tables and for checks that run every method; neither a default nor a recommendation.
    """

    name: str
    build: Callable[..., Correction]
    aliases: tuple[str, ...] = ()
    multiplier: str = ""
    paper: str = ""
    provenance: str = ""
    notes: str = ""
    on_policy: bool = True
    schedules: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The method's own options, with their defaults."""
        return dict(inspect.signature(self.build).parameters)

    @property
    def required(self) -> list[str]:
        """The options that have no default."""
        any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        options = self.options.items()
        return [name for name, option in options if option.default is option.empty and option.kind not in any_number]

    def __call__(self, **options: Any) -> Correction:
        """Returns the correction with the given options."""
        known = [*self.options, *(name for name in _COMMON if name not in self.options)]
        for name in options:
            if name not in known:
                near = _same_bound(name, known) or nearest(name, known, ".")
                raise ValueError(f"{self.name} has no option {name!r}{near} It has {known}")
        if missing := [name for name in self.required if name not in options]:
            values = ", ".join(f"{name}={self.example[name]!r}" for name in missing if name in self.example)
            shown = f", for instance {values} (an illustration, no recommendation)" if values else ""
            if missing == ["batch"]:
                shown = ". A method is a function of its options that returns a Correction, and no function of a batch"
            raise ValueError(f"{self.name} requires {' and '.join(missing)}, without a default: pass a value{shown}")
        for name, kind in _SLOTS.items():
            if name in options:
                options[name] = stage_from_config(kind, options[name])
        own = {name: value for name, value in options.items() if name in self.options}
        for name, value in own.items():
            _check_type(f"{self.name}: {name}", value, self.options[name].annotation)
        correction = self.build(**own)
        if not isinstance(correction, Correction):
            raise TypeError(f"{self.name} built a {type(correction).__name__}, expected an offcorr.Correction")
        common = {name: value for name, value in options.items() if name not in own}
        if "aggregate" in common and "max_length" not in common:
            common["max_length"] = None
        defaults = {name: option.default for name, option in self.options.items() if option.default is not option.empty}
        made = dataclasses.replace(correction, **common)
        if slots := [f"{slot}=" for slot in _SLOTS if slot in common]:
            for name in own:
                if self._replaced(name, own, common, correction, made):
                    raise ValueError(
                        f"{self.name}: {name} is {own[name]!r}, an option of a stage that {' or '.join(slots)} "
                        "replaces, so that it has no effect: leave it out, or give it to the new stage"
                    )
        return named(made, self.name, defaults | options)

    def _replaced(
        self, name: str, own: Mapping[str, Any], common: Mapping[str, Any], built: Correction, made: Correction
    ) -> bool:
        """Whether an option changes what the method builds, and not what is left of it once its stages are replaced."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                other = self.build(**{option: value for option, value in own.items() if option != name})
            return bool(other != built and dataclasses.replace(other, **common) == made)
        except (RuntimeError, TypeError, ValueError):  # it has no default, or the numbers are tensors
            return False


def _same_bound(name: str, known: list[str]) -> str:
    """The option with the same effect, where a bound on the ratio is given as a distance from 1 or the other way round.

    >>> _same_bound("eps_high", ["cap", "low"])
    ': its upper bound is cap, of the ratio itself, 1 + eps_high.'
    >>> _same_bound("cap", ["eps_low", "eps_high"]), _same_bound("seed", ["cap"])
    (': its upper bound is eps_high, the distance from 1, cap - 1.', '')
    >>> _same_bound("epsilon", ["eps_low", "eps_high"])
    ': epsilon is both bounds, here eps_low and eps_high.'
    """
    if name == "epsilon" and {"eps_low", "eps_high"} <= set(known):
        return ": epsilon is both bounds, here eps_low and eps_high."
    for side, bounds, distance, formula in (
        ("upper", ("cap", "high"), "eps_high", ("1 + eps_high", "{} - 1")),
        ("lower", ("low",), "eps_low", ("1 - eps_low", "1 - {}")),
    ):
        if name == distance and (own := next((bound for bound in bounds if bound in known), "")):
            return f": its {side} bound is {own}, of the ratio itself, {formula[0]}."
        if name in bounds and distance in known:
            return f": its {side} bound is {distance}, the distance from 1, {formula[1].format(name)}."
    return ""


def _check_type(what: str, value: Any, annotation: Any) -> None:
    """Raise ``ValueError`` where a number or a truth value is annotated and something else came.

    The method would compute with it before any stage looks at it.
    """
    wanted = getattr(annotation, "__name__", annotation)
    if wanted == "bool" and not isinstance(value, bool):
        raise ValueError(f"{what} is {value!r}, expected True or False")
    if wanted in ("float", "int") and (isinstance(value, bool) or not isinstance(value, int | float | Tensor)):
        schedule = "; in a trainer also a schedule, {'start': ..., 'end': ...}" if isinstance(value, Mapping) else ""
        raise ValueError(f"{what} is {value!r}, expected a finite number{schedule}")


_METHODS: dict[str, Method] = {}


def register(name: str, **about: Any) -> Callable[[Any], Any]:
    """Decorator that registers a function (or class) from keyword options to a Correction as the method ``name``.

    The other arguments are the fields of ``Method``: aliases, multiplier, paper, provenance, notes, on_policy,
    schedules, example.

    Raises:
        TypeError: one of them is none of these fields.
        ValueError: another method has this name or alias, the name could not be written in a spec, or ``example``
            names other options than those that have no default.

    >>> import offcorr
    >>> @offcorr.register("half_ppo", multiplier="as ppo, with half the clip range")
    ... def half_ppo(eps: float = 0.1) -> offcorr.Correction:
    ...     return offcorr.Correction(gate=offcorr.gates.Clip(eps, eps))
    >>> offcorr.get("half_ppo", eps=0.05).gate.eps_low
    0.05
    >>> offcorr.unregister("half_ppo")
    >>> offcorr.register("half_ppo", multipler="as ppo")
    Traceback (most recent call last):
    TypeError: register has no argument 'multipler', did you mean 'multiplier'? It has name and ['aliases', ...
    """
    fields = [one.name for one in dataclasses.fields(Method) if one.name not in ("name", "build")]
    for word in about:
        if word not in fields:
            raise TypeError(f"register has no argument {word!r}{nearest(word, fields, '.')} It has name and {fields}")

    def decorate(build: Any) -> Any:
        method = Method(name, build, **about)
        if method.example.keys() != set(method.required):
            raise ValueError(
                f"example of {name!r} gives {sorted(method.example)}, expected a value for each option without a "
                f"default: {method.required}"
            )
        if not str(getattr(build, "__module__", "")).startswith(f"{__package__}."):
            _load_own()  # whose names may not be known yet
        for word in (name, *method.aliases):
            _check_name(word)
            known = _METHODS.get(word)
            if known is not None and not same_definition(known.build, build):
                raise ValueError(
                    f"a method named {word!r} exists already: {_source(known.build)} and {_source(build)} have this "
                    "name; register yours under another"
                )
        for word in (name, *method.aliases):
            _METHODS[word] = method
        return _calling(method, build) if inspect.isfunction(build) else build

    return decorate


def _check_name(name: Any) -> None:
    """Raise ValueError for a name that could not be written in a spec, where these characters have a meaning."""
    if not isinstance(name, str) or not re.fullmatch(r"[^\s?&=:/]+", name):
        raise ValueError(f"method name is {name!r}, expected a word without blanks and without any of ? & = : /")


def _calling(method: Method, build: Any) -> Any:
    """Wraps ``build`` so that it returns the named method: ``ppo(...)`` equals ``offcorr.get("ppo", ...)``."""
    signature = inspect.signature(build)

    @functools.wraps(build)
    def call(*args: Any, **options: Any) -> Correction:
        return method(**signature.bind_partial(*args).arguments, **options)

    call.method = method  # type: ignore[attr-defined]
    return call


def registered(build: Any) -> Method | None:
    """Returns the method as which a function or class was registered; None if it was not."""
    own = getattr(build, "method", None)
    if isinstance(own, Method):
        return own
    return next((method for method in catalogue() if method.build is build), None)


def unregister(name: str) -> None:
    """Removes a method and its aliases from the registry."""
    method = _method(name)
    for word in (method.name, *method.aliases):
        _METHODS.pop(word, None)


def available() -> list[str]:
    """Returns the names of all methods, including aliases, sorted."""
    _discover()
    return sorted(_METHODS)


def catalogue() -> list[Method]:
    """Returns every method once, sorted by name."""
    _discover()
    return [method for name, method in sorted(_METHODS.items()) if name == method.name]


def option_names() -> set[str]:
    """Returns the names of the options of all methods."""
    return {name for method in catalogue() for name in method.options} | {*_COMMON}


def get(spec: str, **options: Any) -> Correction:
    """Returns the correction of the method ``spec`` with the given options.

    ``weight=`` and ``reject=`` replace the method's own stages; None removes them.  Options may also be part of the
    name, as literal values: ``"minpro?eps_high=0.28&aggregate=sum"``.

    Raises:
        ValueError: the method or an option is unknown (the nearest name is suggested), a value is out of range, or an
            option is given twice.

    >>> import offcorr
    >>> offcorr.get("dapo", eps_high=0.3).gate
    Clip(eps_low=0.2, eps_high=0.3, dual_clip=None)
    >>> offcorr.get("dapo?eps_high=0.3") == offcorr.get("dapo", eps_high=0.3)
    True
    >>> offcorr.get("minprop")
    Traceback (most recent call last):
    ValueError: unknown method 'minprop', did you mean 'minpro'? offcorr.available() lists them; your own ...
    """
    name, given = split_spec(spec)
    return _method(name)(**_joined(spec, given, options))


def illustration(spec: str, **options: Any) -> Correction:
    """As ``resolve``, with the values of ``Method.example`` for options that have no default and are not given.

    For tables, and for checks that run every method; a training run gives its own values.

    >>> illustration("ppo") == get("ppo")
    True
    """
    found, given = find(spec), split_spec(spec)[1]
    if not isinstance(found, Method):
        return resolve(spec, **options)
    return found(**{**found.example, **_joined(spec, given, options)})


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Splits a spec into its name and the options after its "?".

    Values are read as Python literals; any other text is a string.

    Raises:
        ValueError: an option has no value, a number too large for a float, or is given twice.

    >>> split_spec("icepop?high=2&aggregate=token-mean")
    ('icepop', {'high': 2, 'aggregate': 'token-mean'})
    """
    if not isinstance(spec, str):
        raise ValueError(f"method is {spec!r}, expected a name, for instance 'minpro' or 'minpro?eps_high=0.28'")
    name, _, query = spec.partition("?")
    options: dict[str, Any] = {}
    for part in query.split("&") if query else ():
        option, equals, value = part.partition("=")
        if not (option and equals and value) or "=" in value or option in options:
            raise ValueError(f"{spec!r} holds {part!r}, expected name=value once for each option, joined by '&'")
        options[option] = _literal(option, value)
    return name, options


def _literal(option: str, text: str) -> Any:
    """The value of an option: a Python literal, or the text itself where it is none."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    numbers = (node.value for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Constant))
    if math.inf in numbers:  # a number too large to be one
        raise ValueError(f"{option} is {text}, which is too large for a float, expected a finite number")
    return value


def _joined(spec: str, given: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    for name in given.keys() & options.keys():
        raise ValueError(f"{name} is {options[name]!r}, but {spec!r} holds it too: give it once")
    return {**given, **options}


def from_config(config: Mapping[str, Any]) -> Correction:
    """Builds a correction from plain data: ``{"method": name, **options}``, or ``"custom"`` with its stages as options.

    Raises:
        ValueError: there is no method, or an option is unknown.

    >>> import offcorr
    >>> loss_fn = offcorr.from_config({"method": "ppo", "weight": {"name": "truncate", "cap": 2.0}})
    >>> offcorr.from_config(loss_fn.to_config()) == loss_fn
    True
    """
    if not isinstance(config, Mapping) or "method" not in config:
        raise ValueError(f"config is {config!r}, expected a mapping with a 'method'")
    options = dict(config)
    name = options.pop("method")
    if name != "custom" and (stages := sorted({"ratio", "gate"} & options.keys())):
        raise ValueError(
            f"{stages[0]} is given beside method {name!r}, whose own it is: write method 'custom' to compose stages"
        )
    _discover()  # some stages are defined in the file of the only method that uses them
    if name != "custom":
        return resolve(name, **options)
    for option in options:
        if option not in FIELDS:
            raise ValueError(f"custom has no option {option!r}{nearest(option, FIELDS, '.')} It has {list(FIELDS)}")
    for option, kind in _SLOTS.items():
        if option in options:
            options[option] = stage_from_config(kind, options[option])
    return Correction(**options)


def resolve(spec: str, **options: Any) -> Correction:
    """Builds a correction from a trainer's ``loss_type``.

    It is "minpro", "offcorr:dapo" or "my_file.py:my_loss", with options after a "?" if there are any (see ``get``).
    ``my_loss`` is the method that the file registers under this name, or else what the file calls so.
    """
    name, given = split_spec(spec)
    options = _joined(spec, given, options)
    found = find(name)
    if isinstance(found, Method):
        return found(**options)
    if options:
        raise ValueError(f"{name} is a finished Correction, expected no options, got {sorted(options)}")
    return found


def find(spec: str) -> Method | Correction:
    """Returns the method, or the finished Correction, that ``spec`` names, without its options (see ``resolve``)."""
    name, _ = split_spec(spec)
    path, symbol = file_of(spec), name.rpartition(":")[2]
    if not path:
        return _method(symbol)
    found = _load_symbol(path, symbol)
    if isinstance(found, Correction):
        return found
    if isinstance(found, Stage) or (isinstance(found, type) and issubclass(found, Stage)):
        slot = next((slot for slot, kind in _SLOTS.items() if kind == found.KIND), found.KIND)
        made = f"{symbol}(...)" if isinstance(found, type) else symbol
        raise ValueError(f"{path} has {symbol!r}, a {found.KIND}, expected a correction: Correction({slot}={made})")
    if not callable(found):
        raise ValueError(
            f"{path} has {symbol!r}, which is {found!r}, expected a correction, or a function or class that returns one"
        )
    return registered(found) or Method(name, found)


def file_of(spec: str) -> str:
    """The file that ``spec`` names; "" where it names a registered method (see ``resolve``).

    >>> file_of("mine.py:my_loss?cap=2"), file_of("offcorr:dapo")
    ('mine.py', '')
    """
    path = split_spec(spec)[0].rpartition(":")[0]
    return "" if path == "offcorr" else path


def _load_symbol(path: str, symbol: str) -> Any:
    if not path.endswith(".py"):
        raise ValueError(f"loss {path}:{symbol} is not known, expected offcorr:NAME or FILE.py:SYMBOL")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"{path} is not a file, expected the file that defines {symbol}")
    module = _load_file(file)
    method = _METHODS.get(symbol)
    if method is not None and method.build.__module__ == module.__name__ and _is_of(method.build, module):
        return method.build  # the name it was registered under, though a helper may have it too
    if hasattr(module, symbol):
        return getattr(module, symbol)
    own = _contents(module)
    has = f" It has {', '.join(f'{name!r} ({kind})' for name, kind in own.items())}" if own else ""
    raise ValueError(f"{path} defines no {symbol!r}{nearest(symbol, own, '.' if own else '')}{has}")


def _contents(module: Any) -> dict[str, str]:
    """The definitions of a user's file, by name: methods, corrections, stages and functions; not what it imports."""
    methods = {name: one for name, one in _METHODS.items() if one.build.__module__ == module.__name__}
    built = {inspect.unwrap(one.build) for one in methods.values()}
    found = dict.fromkeys(methods, "a method")
    for name, value in vars(module).items():
        defined = getattr(value, "__module__", None) == module.__name__
        if isinstance(value, Correction):
            found.setdefault(name, "a correction")
        elif isinstance(value, type) and issubclass(value, Stage) and defined:
            found.setdefault(name, f"a {value.KIND}")
        elif inspect.isfunction(value) and defined:
            found.setdefault(name, "a method" if inspect.unwrap(value) in built else "a function")
    return found


def _is_of(build: Any, module: Any) -> bool:
    """Whether a function is of the file as it was read last, and not of an earlier version; of a class, True."""
    return getattr(inspect.unwrap(build), "__globals__", vars(module)) is vars(module)


_LOADED: dict[Path, tuple[int, Any]] = {}
"""The files of users that were read: when each had been written, and its module."""


def _load_file(file: Path) -> Any:
    """The module of a file: as it was imported, or else read here, and again where the file has changed since."""
    written = file.stat().st_mtime_ns
    known_at, known = _LOADED.get(file, (None, None))
    if known is None and (imported := _imported(file)) is not None:
        return imported
    if known_at != written:
        _LOADED[file] = written, _read(file, known.__name__ if known else None)
    return _LOADED[file][1]


def _imported(file: Path) -> Any:
    """The module that was imported from a file, if there is one."""
    for module in list(sys.modules.values()):
        origin = getattr(module, "__dict__", {}).get("__file__")  # some modules answer for any attribute
        if isinstance(origin, str) and os.path.basename(origin) == file.name and Path(origin).resolve() == file:
            return module
    return None


def _read(file: Path, name: str | None) -> Any:
    """The file as a module of its own, under the name that it had before if it is read again."""
    if name is None:
        name = f"offcorr_user_{file.stem}"
        if name in sys.modules:  # another file of that name
            name += f"_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    if (folder := str(file.parent)) not in sys.path:
        sys.path.append(folder)  # the file may import its neighbours, as a script does
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _method(name: str) -> Method:
    _discover()
    if name.endswith(".py"):
        wanted = f"{name}:NAME, where NAME is a function in it that returns a Correction, or a Correction"
        raise ValueError(f"method {name!r} names a file, expected {wanted}")
    if ".py:" in name:
        raise ValueError(f"unknown method {name!r}: it names a file, which offcorr.resolve({name!r}) reads")
    bare = name.removeprefix("offcorr:")
    if bare != name and bare in _METHODS:
        raise ValueError(
            f"unknown method {name!r}: the prefix is for GRPOConfig, where TRL has names of its own; write {bare!r}"
        )
    if name not in _METHODS:
        raise ValueError(
            f"unknown method {name!r}{nearest(name, _METHODS, '.')} offcorr.available() lists them; your own are "
            "known once the module that registers them is imported"
        )
    return _METHODS[name]


def _source(build: Any) -> str:
    return f"{build.__module__}.{build.__qualname__}"


@functools.cache
def _load_own() -> None:
    """Imports every file of ``offcorr.methods``."""
    import offcorr.methods

    for module in pkgutil.iter_modules(offcorr.methods.__path__):
        importlib.import_module(f"offcorr.methods.{module.name}")


def _discover() -> None:
    """Imports every file of ``offcorr.methods`` and every entry point of the group ``offcorr.methods``."""
    _load_own()
    for entry in importlib.metadata.entry_points(group="offcorr.methods"):
        entry.load()
