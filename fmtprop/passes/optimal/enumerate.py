"""Every way to run every node of a normal graph.

Owns the requests to a target. Must not know a library: candidates and costs come from the target. Nodes that depend
only on constants are left out: they are computed once, so their formats cost nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Any

from fmtprop.errors import FmtpropError, OptionError, UnsupportedOpError
from fmtprop.ir import Category, Graph, Node, TensorType, Value, linear_of, opdef, result_names, sources
from fmtprop.ir.grid import Grid, usual_limits
from fmtprop.layout import MemoryDesc
from fmtprop.layout.parts import in_place_parts
from fmtprop.ops import Concat, FakeQuantize
from fmtprop.passes.assignment.formats import describe, like, plain
from fmtprop.passes.optimal.usable_formats import usable_formats
from fmtprop.passes.optimal.variants import FUSIONS
from fmtprop.passes.optimal.ways import Enumeration, Way
from fmtprop.passes.precision.in_bytes import in_bytes, in_reals
from fmtprop.passes.target import AS_GRADIENT, Candidate, Setting, can_be_read, equivalent_of, free_request

#: "node.operand" or "node.dst" -> its required format
Pins = Mapping[str, MemoryDesc]

#: implementations of one request that are tried, in the target's order: later ones are rarely the best
_IMPLEMENTATIONS = 3

#: kernels for vectors and blocks support sizes from the first on that the same powers of two up to the second divide
_LARGE, _BLOCK = 32, 64

#: size from which all are many: a first convolution's three channels, a row and a window of one have their own kernels;
#: and the channels of a block, which groups must have
_SEVERAL, _VECTOR = 5, 16


def enumerate_ways(
    graph: Graph,
    setting: Setting,
    known: Mapping[str, Sequence[Candidate]],
    pins: Pins,
) -> Enumeration:
    """Ask the target for the ways to run each node.

    `pins`: required formats of operands and results, by ``"node.operand"``. Raises UnsupportedOpError if no target can
    run a node, or none can with its pins.
    """
    return _Enumerator(graph, setting, known, pins).run()


class _Enumerator:
    def __init__(self, graph: Graph, setting: Setting, known: Mapping[str, Sequence[Candidate]], pins: Pins) -> None:
        self.graph, self.setting, self.known, self.pins = graph, setting, known, pins
        self.target, self.fallback = setting.target, setting.fallback
        self.usable_formats = usable_formats(graph, setting.target)
        self.found = Enumeration(graph)
        #: of each node of a kind (equal blocks of a network have equal nodes) its ways by their identities
        self._of_kind: dict[object, dict[object, Candidate]] = {}
        #: what the answers to one node's requests tell about nodes that differ from it in large sizes alone (a network
        #: has many such convolutions): the numbers of the requests that gave a new way, each with the last new one: its
        #: implementation, and how many ways of this implementation the request had given by then
        self._useful: dict[object, dict[int, tuple[str, int]]] = {}
        #: requests without an optimized way, by the rough kind of their node: others of its kind make them last of all
        self._vain: set[object] = set()

    def run(self) -> Enumeration:
        for node in self.graph.nodes():
            inputs = self.graph.inputs(node.name)
            if node.op != "input" and not any(value in self.found.formats for value in inputs.values()):
                continue  # constant
            distinct = self._distinct(node, inputs, self.known.get(node.name, ()))
            ways = [candidate for candidate in distinct if self._obeys(node, candidate)]
            if not ways:
                error = OptionError if self._pins_of(node) else UnsupportedOpError
                raise error(self._complaint(node))
            self.found.ways[node.name] = [Way(node, inputs, candidate, (node.name,)) for candidate in ways]
            self._note_formats(node, inputs, (*ways, *distinct))  # readers may ask for more than a pin does
            self._fuse(node)
        self.found.detours = self._detours()
        return self.found

    def _detours(self) -> dict[tuple[MemoryDesc, MemoryDesc], MemoryDesc]:
        """Find the changes of format that need two reorders, such as from interleaving strides to blocks."""
        pairs = dict.fromkeys(pair for pairs in self.found.reorders().values() for pair in pairs)
        found = {}
        for src, dst in pairs:
            if src.is_dense or plain(dst) in (src, dst):
                continue
            node = Node("reorder", "reorder", opdef("reorder").attrs(), (TensorType(dst.dims, dst.dtype),))
            request = {"src": src, "dst": dst}
            if not any(True for who in (self.target, self.fallback) for _ in who.candidates(node, request)):
                found[src, dst] = plain(dst)
        return found

    def _fuse(self, node: Node) -> None:
        """Add the ways to run a node together with the nodes before it."""
        for pair in filter(None, (fusion.rewrite(self.graph, node) for fusion in FUSIONS)):
            before = [self.graph.node(name) for name in pair.covers[:-1]]
            if any(one.name not in self.found.ways or self._pins_of(one) for one in before):
                continue  # a constant; or the tensor between them has no format, and the operands are the first one's
            if self._pins_of(node).keys() & self.graph.inputs(node.name).keys():
                continue
            ways = [
                candidate
                for candidate in self._distinct(pair.node, pair.inputs)
                # the fallback would run the nodes separately
                if self._obeys(node, candidate) and not candidate.is_ref and candidate.target != self.fallback.name
            ]
            self.found.ways[node.name] += [Way(pair.node, pair.inputs, c, pair.covers) for c in ways]
            self._note_formats(pair.node, pair.inputs, ways)

    # ------------------------------------------------------------------ one node

    def _distinct(self, node: Node, inputs: Mapping[str, Value], known: Sequence[Candidate] = ()) -> list[Candidate]:
        """Return the node's distinct ways, without the library's reference loops if there are others."""
        kind = self._kind(node, inputs)
        if kind not in self._of_kind:
            ways = self._of_kind[kind] = {}
            for candidate in self._ways(node, inputs):
                ways.setdefault(_identity(candidate), candidate)
        seen = dict(self._of_kind[kind])
        for candidate in known:  # last, since it is not known whether they are references
            seen.setdefault(_identity(candidate), candidate)
        real = [candidate for candidate in seen.values() if not candidate.is_ref]
        return real or list(seen.values())

    def _kind(self, node: Node, inputs: Mapping[str, Value]) -> tuple[object, ...]:
        """Return all that a node's ways depend on."""
        own = node.name if node.is_boundary or self._pins_of(node) else ""
        tail = tuple((post_op.op, post_op.attrs, post_op.operands) for post_op in node.post_ops)
        formats = (self.found.formats.get(value) for value in inputs.values())
        read = tuple(None if some is None else tuple(some) for some in formats)
        types = tuple(map(self.graph.type_of, inputs.values()))
        writable = tuple(tuple(self.usable_formats.get(Value(node.name, i), ())) for i in range(len(node.results)))
        # the scales of weights do not decide
        grids = tuple((name, grid.shape or grid) for name, grid in node.grids.items())
        return own, node.op, node.attrs, tail, node.exact, node.results, tuple(inputs), types, read, writable, grids

    def _ways(self, node: Node, inputs: Mapping[str, Value]) -> Iterator[Candidate]:
        if node.op == "input":
            desc = self.setting.boundary.get(node.name, plain(MemoryDesc(node.results[0].dims, node.results[0].dtype)))
            yield Candidate("boundary", "input", {}, (desc,))
        elif node.op == "output":
            type_ = self.graph.type_of(inputs["src"])
            desc = self.setting.boundary.get(node.name, MemoryDesc(type_.dims, type_.dtype))
            yield Candidate("boundary", "output", {"src": desc}, ())
        elif opdef(node.op).category is Category.VIEW:
            yield from self._views(node, inputs["src"])
        elif opdef(node.op).category is Category.HOST:
            for request in self._requests(node, inputs):
                yield from self.target.candidates(node, request)
            yield from self._fall_back(node, inputs)
            if opdef(node.op).pytorch.any_strides(node.attrs):
                yield from self._by_fallback(node, inputs)
        else:
            yield from self._asked(node, inputs)

    def _views(self, node: Node, source: Value) -> Iterator[Candidate]:
        rule = opdef(node.op).view
        possible = False
        for desc in self.found.formats[source]:
            try:
                result = rule.dst(node.attrs, desc, node.results[0]) if rule is not None else desc
            except FmtpropError:
                continue
            if not can_be_read(result, self.target, self.fallback):
                continue
            possible = True
            yield Candidate("view", "view", {"src": desc}, (result,))
        if not possible:
            yield from self._fall_back(node, {"src": source})

    def _asked(self, node: Node, inputs: Mapping[str, Value]) -> Iterator[Candidate]:
        optimized, kind = False, self._kind(node, inputs)
        likeness, rough = _likeness(kind), _roughly(kind)
        useful, found, seen = self._useful.get(likeness), dict[int, tuple[str, int]](), set[object]()
        requests = list(enumerate(self._pinned(node, self._forms(node, self._requests(node, inputs)))))
        vain = {number for number, request in requests if (rough, _tags(request)) in self._vain}
        late = vain if useful is None else vain | {number for number, _ in requests if number not in useful}
        # the others are asked too, if these are all declined
        requests.sort(key=lambda each: each[0] in late)
        result, written = result_names(node)[0], dict[object, set[MemoryDesc]]()
        for number, request in requests:
            if optimized and number in late:
                break
            others = tuple((name, desc) for name, desc in request.items() if name != result)
            if request[result] in written.setdefault(others, set()):
                continue  # those who chose this format accept it
            is_vain = True
            families: Counter[tuple[str, str, bool]] = Counter()
            given: Counter[str] = Counter()
            for candidate in self.target.candidates(node, request):
                if not (candidate.is_ref or candidate.impl.startswith(AS_GRADIENT)):
                    optimized, is_vain = True, False
                # an equivalent primitive's implementations, which come after all others, are counted separately
                # so are those with a kernel for the last post-op
                member = candidate.target, equivalent_of(candidate.impl), candidate.is_followed
                families[member] += 1
                given[candidate.impl] += 1
                place = candidate.impl, given[candidate.impl]
                if families[member] <= _IMPLEMENTATIONS:
                    identity = _identity(candidate)
                    if not candidate.is_ref and identity not in seen:
                        seen.add(identity)
                        found[number] = place
                    if not candidate.is_ref:
                        written[others].add(candidate.results[0])
                    yield candidate
                if useful is not None and useful.get(number) == place:
                    break  # the others were none of the first one's
            if is_vain:
                self._vain.add((rough, _tags(request)))
        if found:
            self._useful.setdefault(likeness, found)
        if isinstance(node.attrs, Concat) and self.setting.in_place:
            yield from self._in_place(node, node.attrs, inputs)
        # PyTorch's products use the same kernels, but pack their weights in each run; of deconvolutions it has others
        if not optimized or (self.setting.competing and opdef(node.op).category is not Category.COMPUTE):
            yield from self._by_fallback(node, inputs)

    def _by_fallback(self, node: Node, inputs: Mapping[str, Value]) -> Iterator[Candidate]:
        """Yield the fallback's ways for a node that the target may run, too: in each strided format of its sources."""
        free = self._free(node, inputs)
        read = self._activations(node, inputs)
        offers = [chosen for chosen in self._source_formats(node, inputs, read) if _are_strided(chosen)]
        if not offers:
            yield from self._fall_back(node, inputs)
        for request in self._pinned(node, [{**free, **chosen} for chosen in offers]):
            yield from self.fallback.candidates(node, request)

    def _fall_back(self, node: Node, inputs: Mapping[str, Value]) -> Iterator[Candidate]:
        """Yield the fallback's way to run a node: with row-major operands, or with given strided formats."""
        results = dict(zip(result_names(node), (MemoryDesc(t.dims, t.dtype) for t in node.results), strict=True))
        strided = {
            name: next((f for f in self._formats(value) if f.is_plain), plain(self._formats(value)[0]))
            for name, value in inputs.items()
        }
        row_major = {name: plain(desc) for name, desc in strided.items()}
        for request in (row_major, strided):
            yield from self.fallback.candidates(node, {**request, **results})

    # ------------------------------------------------------------------ requests

    def _requests(self, node: Node, inputs: Mapping[str, Value]) -> Iterator[Mapping[str, MemoryDesc]]:
        """Yield the combinations of formats to request."""
        free = self._free(node, inputs)
        read = self._activations(node, inputs)
        category, has_products = opdef(node.op).category, linear_of(node) is not None
        if node.op == "reorder":
            yield from self._casts(node, inputs["src"])
            return
        if has_products:
            yield free
        first = result_names(node)[0]
        for chosen in self._source_formats(node, inputs, read):
            yield {**free, **chosen}
            if has_products and all(desc.is_plain for desc in chosen.values()):
                # kernels with different source and result formats (a network's first convolution, a matmul) read
                # strided formats: no kernel reads blocks and writes another format
                for dst in self.usable_formats[Value(node.name)]:
                    yield {**free, **chosen, first: dst}
            elif category is Category.MULTI_SRC:
                same = like(free[first], chosen[read[0]]) if read else None
                if same is not None:
                    yield {**free, **chosen, first: same}

    def _forms(self, node: Node, requests: Iterable[Mapping[str, MemoryDesc]]) -> Iterator[Mapping[str, MemoryDesc]]:
        """Yield each request for real numbers, then those for bytes."""
        if not node.grids:
            yield from requests
            return
        real = {tuple(one.values()): one for one in (in_reals(node, request) for request in requests)}
        yield from real.values()
        if self.setting.allows_bytes(node):
            stored = (one for request in real.values() for one in in_bytes(node, request))
            yield from {tuple(one.values()): one for one in stored if not any(map(_is_blocked, one.values()))}.values()

    def _pinned(self, node: Node, requests: Iterable[Mapping[str, MemoryDesc]]) -> Iterator[Mapping[str, MemoryDesc]]:
        """Yield each request, also with the node's pins: some implementations accept only formats that they choose."""
        pins = self._pins_of(node)
        for request in requests:
            yield request
            if pins:
                yield {**request, **{name: pin for name, pin in pins.items() if name in request}}

    def _free(self, node: Node, inputs: Mapping[str, Value]) -> dict[str, MemoryDesc]:
        return free_request(node, {name: self.graph.type_of(value) for name, value in inputs.items()})

    def _activations(self, node: Node, inputs: Mapping[str, Value]) -> list[str]:
        """Return the sources with a choice of format: those that do not depend only on constants."""
        return [name for name in sources(node, inputs) if inputs[name] in self.found.formats]

    def _source_formats(
        self, node: Node, inputs: Mapping[str, Value], sources: Sequence[str]
    ) -> Iterator[dict[str, MemoryDesc]]:
        """Yield formats for all activations: each as it may come with the others likewise, or row-major where small."""
        if not sources:
            yield {}
            return
        descs = {name: self._formats(inputs[name]) for name in sources}
        widest = max(sources, key=lambda name: self.graph.type_of(inputs[name]).size)
        seen = set()
        offers = [f for name in sources for f in descs[name]]
        if opdef(node.op).category is not Category.COMPUTE:
            # it writes the format that it reads: a pin of its result is also a format for its sources
            offers += self._pins_of(node).values()
        for offer in dict.fromkeys(f for f in offers if f.dims == descs[widest][0].dims):
            for chosen in self._matches(descs, sources, offer):
                key = tuple(chosen.items())
                if key not in seen:
                    seen.add(key)
                    yield chosen

    def _matches(
        self, descs: Mapping[str, list[MemoryDesc]], sources: Sequence[str], offer: MemoryDesc
    ) -> Iterator[dict[str, MemoryDesc]]:
        alike: dict[str, MemoryDesc] = {}
        for name in sources:
            match = offer if offer in descs[name] else like(descs[name][0], offer)
            if match is None:
                break
            alike[name] = match
        else:
            yield alike
        if len(sources) > 1:
            # the others in their given formats (a matmul's factors, a broadcast operand), and row-major
            others = [name for name in sources if offer not in descs[name]]
            first = {name: offer for name in sources if name not in others}
            if others and first:
                yield {**first, **{name: descs[name][0] for name in others}}
                yield {**first, **{name: plain(descs[name][0]) for name in others}}

    def _casts(self, node: Node, source: Value) -> Iterator[Mapping[str, MemoryDesc]]:
        type_ = node.results[0]
        for src in self._formats(source):
            same = like(MemoryDesc(type_.dims, type_.dtype), src)
            for dst in dict.fromkeys((same, *self.usable_formats[Value(node.name)])):
                if dst is not None:
                    yield {"src": src, "dst": dst}

    def _in_place(self, node: Node, attrs: Concat, inputs: Mapping[str, Value]) -> Iterator[Candidate]:
        """Yield the concat that moves no data: its sources are written to their positions."""
        sizes = [self.graph.type_of(value).dims[attrs.axis] for value in inputs.values()]
        offers = dict.fromkeys(f for value in inputs.values() for f in self._formats(value) if f.is_packed)
        type_ = node.results[0]
        seen = set()
        for offer in offers:
            whole = like(MemoryDesc(type_.dims, type_.dtype), offer)
            if whole is None or whole in seen or whole.dtype is not offer.dtype:
                continue
            seen.add(whole)
            parts = in_place_parts(whole, attrs.axis, sizes)
            if parts is not None:
                operands = {name: part.at_start() for name, part in zip(inputs, parts, strict=True)}
                yield Candidate("view", "in_place", operands, (whole,))

    # ------------------------------------------------------------------ formats and pins

    def _formats(self, value: Value) -> list[MemoryDesc]:
        known = self.found.formats.get(value)
        if known is not None:
            return known
        type_ = self.graph.type_of(value)
        return [MemoryDesc(type_.dims, type_.dtype)]

    def _note_formats(self, node: Node, inputs: Mapping[str, Value], ways: Iterable[Candidate]) -> None:
        """Record the formats in which each tensor may be written and read."""
        for index in range(len(node.results)):
            value = Value(node.name, index)
            written = dict.fromkeys(candidate.results[index] for candidate in ways)
            earlier = self.found.formats.get(value, [])  # formats of the same node without fusion
            self.found.formats[value] = list(dict.fromkeys((*earlier, *written, *self.usable_formats[value])))
        for name, value in inputs.items():
            if value in self.found.formats:
                formats = self.found.formats[value]
                formats += [d for d in dict.fromkeys(c.operands[name] for c in ways) if d not in formats]

    def _pins_of(self, node: Node) -> dict[str, MemoryDesc]:
        """Return a node's pins by operand or result."""
        parts = ((name.rpartition("."), desc) for name, desc in self.pins.items())
        return {port: desc for (owner, _, port), desc in parts if owner == node.name}

    def _obeys(self, node: Node, candidate: Candidate) -> bool:
        pins = self._pins_of(node)
        return all(pins.get(name, desc) == desc for name, desc in _formats_of(node, candidate).items())

    def _complaint(self, node: Node) -> str:
        pins = self._pins_of(node)
        if not pins:
            return f"{node.label}: neither {self.target.name} nor {self.fallback.name} can run it"
        self.pins = {}  # now find the candidates without pins
        free = [_formats_of(node, candidate) for candidate in self._distinct(node, self.graph.inputs(node.name))]
        asked = " and ".join(f"pin '{node.name}.{name}' asks for {describe(desc)}" for name, desc in pins.items())
        offered = "; ".join(
            dict.fromkeys(", ".join(f"{name} {describe(way[name])}" for name in pins if name in way) for way in free)
        )
        together = "" if len(pins) == 1 else " together"
        return (
            f"{asked}, but no implementation of {node.label} offers that{together}; available: {offered or 'nothing'}"
        )


@lru_cache(maxsize=8192)
def _likeness(part: Any) -> object:
    """Return a kind without its large sizes and scales, in which alone hundreds of convolutions of a network differ."""
    if isinstance(part, tuple):
        return tuple(map(_likeness, part))
    if hasattr(part, "groups"):  # as many as channels, in a depthwise convolution
        return replace(part, groups=1), _likeness_of_size(part.groups)
    if isinstance(part, FakeQuantize | Grid):  # each layer has its own scale and zero point
        return usual_limits(part.low, part.high)
    if not isinstance(part, MemoryDesc | TensorType):
        return part
    tag = part.tag if isinstance(part, MemoryDesc) else None
    if tag is None and isinstance(part, MemoryDesc) and part.kind != "any":
        return part
    return tag, part.dtype, tuple(map(_likeness_of_size, part.dims))


def _likeness_of_size(size: int) -> object:
    return gcd(size, _BLOCK), min(size, _LARGE)


def _roughly(kind: tuple[Any, ...]) -> object:
    """Return what decides which formats have kernels: no formats, no large sizes, of an image not even a divisor."""
    own, op, attrs, tail, exact, results, names, types, _, _, grids = kind
    how = (replace(attrs, groups=1), min(attrs.groups, 2)) if hasattr(attrs, "groups") else attrs
    post_ops = tuple((post_op, getattr(of, "alg", "")) for post_op, of, _ in tail)
    sizes = tuple((type_.dtype, _rough_sizes(type_.dims)) for type_ in (*types, *results))
    return own, op, how, post_ops, exact, names, sizes, bool(grids)


def _rough_sizes(dims: tuple[int, ...]) -> object:
    channels = dims[:2] if len(dims) > 3 else dims
    return tuple(min(size, _SEVERAL) for size in dims), tuple(gcd(size, _VECTOR) for size in channels)


def _tags(request: Mapping[str, MemoryDesc]) -> object:
    return tuple((name, desc.dtype, desc.tag or desc.kind) for name, desc in request.items())


def _formats_of(node: Node, candidate: Candidate) -> dict[str, MemoryDesc]:
    """Return the formats of a candidate's operands and results by name."""
    names = () if node.is_boundary else result_names(node)
    return {**candidate.operands, **dict(zip(names, candidate.results, strict=False))}


def _identity(candidate: Candidate) -> object:
    operands = tuple(sorted(candidate.operands.items(), key=_by_name))
    return candidate.target, candidate.impl, operands, candidate.results


def _are_strided(formats: Mapping[str, MemoryDesc]) -> bool:
    return all(desc.is_plain for desc in formats.values())


def _is_blocked(desc: MemoryDesc) -> bool:
    """Whether a format has blocks: kernels for bytes read and write channels innermost."""
    return desc.kind == "blocked" and bool(desc.inner_blocks)


def _by_name(item: tuple[str, MemoryDesc]) -> str:
    return item[0]
