"""Instructions of other processors in LLVM's own, so that kernels for any of them run anywhere."""

from llvmlite import ir

from skinny_kernels import block_formats, block_products
from skinny_kernels.vectors import I32


def _byte(b, words, n, *, signed):
    """Return byte n of every lane, as a number."""
    kind = words.type
    at_top = b.shl(words, ir.Constant(kind, [24 - 8 * n] * kind.count))
    move = b.ashr if signed else b.lshr
    return move(at_top, ir.Constant(kind, [24] * kind.count))


def _dot(self, total, weights, inputs, x, offset):
    b = self.b
    if inputs is None:
        word = self.load(b.add(x, ir.Constant(x.type, offset)), I32)
        inputs = self.splat_bits(word)
    weights, inputs = (b.bitcast(value, total.type) for value in (weights, inputs))
    for n in range(4):
        weight = _byte(b, weights, n, signed=self.signed)
        total = b.add(total, b.mul(weight, _byte(b, inputs, n, signed=True)))
    return total


def _in_16_bits(self, quants, x, places):
    """In 16 bits, as the instruction adds them up: sums that do not fit show."""
    b, byte = self.b, ir.VectorType(ir.IntType(8), 4 * self.lanes)
    zero = ir.Constant(self.integers, [0] * self.lanes)
    found = []
    for s in range(len(places[0][1])):
        for lane in range(0, block_products.ROWS, self.lanes):
            low, high = zero, zero
            for rows, offsets in places:
                at = b.add(quants, ir.Constant(quants.type, rows + 4 * lane))
                weights = b.bitcast(self.load(at, byte), zero.type)
                inputs = b.bitcast(self._repeated(x, offsets[s]), zero.type)
                pair = [
                    b.mul(
                        _byte(b, weights, n, signed=self.signed), _byte(b, inputs, n, signed=True)
                    )
                    for n in range(4)
                ]
                low, high = b.add(low, b.add(*pair[:2])), b.add(high, b.add(*pair[2:]))
            wrapped = [_wrapped(b, value) for value in (low, high)]
            found.append(b.add(*wrapped))
    return found


def _wrapped(b, values):
    """Return the lowest 16 bits as numbers with a sign."""
    sixteen = ir.Constant(values.type, [16] * values.type.count)
    return b.ashr(b.shl(values, sixteen), sixteen)


def _looked_up(self, places, table):
    b, count = self.emitter.b, places.type.count
    found = ir.Constant(places.type, [0] * count)
    for n, value in enumerate(table):
        here = b.icmp_unsigned("==", places, ir.Constant(places.type, [n] * count))
        found = b.select(here, ir.Constant(places.type, [value & 0xFF] * count), found)
    return found


def install():
    """Let kernels be made of these."""
    block_products.Products._dot = _dot
    block_products.Products._in_16_bits = _in_16_bits
    block_formats.InterleavedBlocks._looked_up = _looked_up
