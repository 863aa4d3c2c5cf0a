"""Triton kernels of a convolution with few input channels, an activation and a pool in one.

The convolution is that of ``few_channels``. A pool's window holds LEAD = kernel - stride (0 or 1)
of the outputs that are the previous window's own, and its own: output ``t`` owns ``t * stride``
and as many after it as the stride says. Along the width the stride is 2, and a group of outputs is
one pair or two. So a pool is a sum of what pairs own, and of the last of the pair before.

What is summed is a *part*: a tuple of a sum (average), or of a maximum and its place in the window.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hyperslab.kernels.gpu.act_pool import activated, num_in_bounds

WORD = tl.constexpr(16)
"""Filters whose signs, for both outputs of a pair, are one 32-bit number."""
SIZES = ["depth", "height", "width", "out_depth", "out_height", "out_width", "rows"]


@triton.jit(do_not_specialize=["planes", *SIZES])
def conv_pool_kernel(
    packed, weights, bias, out, kept, sums, places,
    x_n, x_d, x_h, depth, height, width,
    out_depth, out_height, out_width, filters, rows, planes,
    CHANNELS: tl.constexpr, KERNEL_D: tl.constexpr, KERNEL_H: tl.constexpr, GROUP: tl.constexpr,
    ROW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_Q: tl.constexpr,
    MAXIMUM: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, COUNTS: tl.constexpr,
    AT_ONCE: tl.constexpr, HAS_BIAS: tl.constexpr, SLOPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pools ``planes`` planes of ``rows`` rows in BLOCK_Q columns, a column a group of outputs.

    Columns are numbered along the width and on through the next ``rows`` rows. Blocks overlap by a
    column where windows do. A program goes down the height for AT_ONCE planes of the convolution,
    then for the next; meanwhile ``sums`` (and ``places``) hold the pools that want more planes.
    """
    N: tl.constexpr = GROUP * BLOCK_F
    PAIRS: tl.constexpr = GROUP // 2
    BLOCK_P: tl.constexpr = BLOCK_Q * PAIRS
    LEAD_D: tl.constexpr = KERNEL[0] - STRIDE[0]
    LEAD_H: tl.constexpr = KERNEL[1] - STRIDE[1]
    LEAD_W: tl.constexpr = KERNEL[2] - STRIDE[2]
    STEP_D: tl.constexpr = STRIDE[0]
    STEP_H: tl.constexpr = STRIDE[1]
    KW: tl.constexpr = KERNEL[2]
    FACE: tl.constexpr = KERNEL[1] * KERNEL[2]
    WHOLE: tl.constexpr = KERNEL[0] * FACE
    PART: tl.constexpr = 2 if MAXIMUM else 1
    CELL: tl.constexpr = PART * (1 + LEAD_W)
    SHARED: tl.constexpr = BLOCK_K == ROW  # planes at once read some inputs alike
    IN_BLOCK: tl.constexpr = BLOCK_K // ROW
    BLOCKS: tl.constexpr = (KERNEL_D + IN_BLOCK - 1) // IN_BLOCK
    NUM_INPUTS: tl.constexpr = KERNEL_D + AT_ONCE - 1 if SHARED else AT_ONCE * BLOCKS
    WARM_UP: tl.constexpr = (KERNEL_H - 1 + LEAD_H + STEP_H - 1) // STEP_H
    CARRIES: tl.constexpr = (LEAD_D > 0) or (STEP_D > AT_ONCE)

    tile = tl.program_id(2)
    per_row = tl.cdiv(out_width, PAIRS)
    chunks = tl.cdiv(out_height, rows)
    first_column = tl.program_id(0) * (BLOCK_Q - LEAD_W) - LEAD_W
    column = first_column + tl.arange(0, BLOCK_Q)
    column = tl.minimum(tl.maximum(column, 0), chunks * per_row - 1)
    q, h0 = column % per_row, column // per_row * rows

    place = tl.arange(0, BLOCK_P)
    column = first_column + place // PAIRS
    mine = (place >= LEAD_W * PAIRS) & (column < chunks * per_row)
    column = tl.minimum(tl.maximum(column, 0), chunks * per_row - 1)
    pair = (column % per_row * PAIRS + place % PAIRS)[:, None]
    row0 = (column // per_row * rows)[:, None]
    mine = mine[:, None] & (pair < out_width)
    f = (tile * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]

    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, N)
    weights += tile * (KERNEL_H * BLOCKS * BLOCK_K * N)
    kernels = ()
    for b in tl.static_range(KERNEL_H * BLOCKS):
        kernels = kernels + (tl.load(weights + (b * BLOCK_K + k)[:, None] * N + n[None, :]),)
    if HAS_BIAS:
        of = tile * BLOCK_F + n % BLOCK_F
        shift = tl.load(bias + of, mask=of < filters, other=0).to(tl.float32)[None, :]

    deep = tl.cdiv(out_depth, planes)
    sample = (tl.program_id(1) // deep).to(tl.int64)
    od0 = tl.program_id(1) % deep * planes
    od1 = min(od0 + planes, out_depth)
    inputs_of = packed + sample * x_n
    window = q[:, None] * (GROUP * CHANNELS) + (k // ROW * x_d + k % ROW)[None, :]
    program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    program = program * tl.num_programs(0) + tl.program_id(0)
    held = place[:, None] * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    if CARRIES:
        sums += program * rows * (BLOCK_P * BLOCK_F)
        if MAXIMUM:
            places += program * rows * (BLOCK_P * BLOCK_F)
    nothing = _nothing(BLOCK_P, BLOCK_F, MAXIMUM)
    first = od0 * STEP_D // AT_ONCE - (LEAD_D if od0 > 0 else 0)
    for step in range(first, od1 * STEP_D // AT_ONCE):
        d = step * AT_ONCE
        od = d // STEP_D
        if (kept is not None) and (not MAXIMUM):
            sign_plane = height * out_width * tl.num_programs(2) * (BLOCK_F // WORD)
            signs = kept + (sample * depth + d) * sign_plane
        unfinished = ()  # the rows above, as far as they are summed
        for _ in tl.static_range(AT_ONCE * (KERNEL_H - 1)):
            unfinished = unfinished + (tl.zeros((BLOCK_Q, N), tl.float32),)
        above = ()  # the last row of the window above, of each plane
        for _ in tl.static_range(AT_ONCE * (1 + LEAD_W)):
            above = above + nothing
        for s in range(-WARM_UP, rows):
            pooled = ()
            for _ in tl.static_range(AT_ONCE * (1 + LEAD_W)):
                pooled = pooled + nothing
            if LEAD_H:
                pooled = above
            for i in tl.static_range(STEP_H):
                r = (h0 + s) * STEP_H + (i + KERNEL_H - 1)
                r = tl.minimum(tl.maximum(r, 0), height + KERNEL_H - 2)
                inputs = ()
                for b in tl.static_range(NUM_INPUTS):
                    if SHARED:
                        depth_at = tl.minimum(d + b, depth + KERNEL_D - 2)
                    else:
                        depth_at = tl.minimum(d + b // BLOCKS, depth - 1) + b % BLOCKS * IN_BLOCK
                    part = inputs_of + depth_at.to(tl.int64) * x_d + (window + r[:, None] * x_h)
                    if KERNEL_D % IN_BLOCK == 0:
                        inputs = inputs + (tl.load(part),)
                    else:
                        there = (b % BLOCKS * IN_BLOCK + k // ROW < KERNEL_D)[None, :]
                        inputs = inputs + (tl.load(part, mask=there, other=0),)
                begun = ()
                ended = ()
                for j in tl.static_range(AT_ONCE):
                    for m in tl.static_range(KERNEL_H):
                        if m < KERNEL_H - 1:
                            total = unfinished[j * (KERNEL_H - 1) + m]
                        else:
                            total = tl.zeros((BLOCK_Q, N), tl.float32)
                        for b in tl.static_range(BLOCKS):
                            total = tl.dot(
                                inputs[j + b if SHARED else j * BLOCKS + b],
                                kernels[(KERNEL_H - 1 - m) * BLOCKS + b],
                                total, input_precision=PRECISION,
                            )  # fmt: skip
                        if m == 0:
                            ended = ended + (total,)
                        else:
                            begun = begun + (total,)
                unfinished = begun
                row = (row0 + s) * STEP_H + i
                new = ()
                for j in tl.static_range(AT_ONCE):
                    y = ended[j]
                    if HAS_BIAS:
                        y += shift
                    if not MAXIMUM:
                        y = activated(y, SLOPE)
                    y0, y1 = tl.split(tl.permute(tl.reshape(y, (BLOCK_P, 2, BLOCK_F)), (0, 2, 1)))
                    there = (row >= 0) & (row < height) & (d + j < depth)
                    if (kept is not None) and (not MAXIMUM):
                        words = _signs(y0, y1, BLOCK_P, BLOCK_F)
                        to = (row * out_width + pair) * tl.num_programs(2) + tile
                        to = to * (BLOCK_F // WORD) + tl.arange(0, BLOCK_F // WORD)[None, :]
                        wanted = there & mine & (s >= 0) & (d >= od0 * STEP_D)
                        tl.store(signs + j * sign_plane + to, words, mask=wanted)
                    new = new + _row_parts(
                        y0, y1, there, there & (2 * pair + 1 < width), LEAD_W, MAXIMUM
                    )
                pooled = _merged(pooled, _moved(new, (LEAD_H + i) * KW, MAXIMUM), MAXIMUM)
                above = new
            total = ()
            for j in tl.static_range(AT_ONCE):
                part = pooled[j * CELL : j * CELL + PART]
                if LEAD_W:
                    part = _merged(
                        part,
                        _after(pooled[j * CELL + PART : j * CELL + CELL], pair, BLOCK_P, MAXIMUM),
                        MAXIMUM,
                    )
                shifted = _moved(part, (LEAD_D + d % STEP_D + j) * FACE, MAXIMUM)
                if j == 0:
                    total = shifted
                else:
                    total = _merged(total, shifted, MAXIMUM)
            is_last = (d + AT_ONCE) % STEP_D == 0
            if CARRIES:
                hold = s * (BLOCK_P * BLOCK_F) + held
                begins = d % STEP_D == 0
                wants = (step > first) & ((not begins) | (LEAD_D > 0))
                before = _load_part(sums, places, hold, wants, MAXIMUM)
                total = _merged(before, total, MAXIMUM)
                if MAXIMUM:
                    code = tl.where(is_last, part[1], total[1]).to(tl.uint8)
                    tl.store(places + hold, code, mask=hold >= 0)
                tl.store(sums + hold, tl.where(is_last, part[0], total[0]), mask=hold >= 0)
            oh = row0 + s
            wanted = mine & (f < filters) & (oh < out_height) & (s >= 0) & is_last & (od >= od0)
            to = (oh * out_width + pair) * filters + f
            plane = (sample * out_depth + od) * out_height * out_width * filters
            value = total[0]
            if MAXIMUM:
                if kept is not None:
                    code = total[1]
                    if SLOPE != 1:
                        code = tl.where(value > 0, code, code + 128)
                    tl.store(kept + plane + to, code.to(tl.uint8), mask=wanted)
                value = activated(value, SLOPE)
            elif COUNTS:
                value *= 1.0 / WHOLE
            else:
                value /= _count(od, oh, pair, depth, height, width, KERNEL, STRIDE)
            tl.store(out + plane + to, value.to(out.dtype.element_ty), mask=wanted)
        if CARRIES:
            tl.debug_barrier()


@triton.jit
def _nothing(BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr, MAXIMUM: tl.constexpr):
    """The part of no outputs."""
    if MAXIMUM:
        least = tl.full((BLOCK_P, BLOCK_F), float("-inf"), tl.float32)
        part = (least, tl.zeros((BLOCK_P, BLOCK_F), tl.int32))
    else:
        part = (tl.zeros((BLOCK_P, BLOCK_F), tl.float32),)
    return part


@triton.jit
def _row_parts(y0, y1, has_first, has_second, LEAD_W: tl.constexpr, MAXIMUM: tl.constexpr):
    """The parts of pairs, and where windows overlap those of their second outputs."""
    if MAXIMUM:
        y0 = tl.where(has_first, y0, float("-inf"))
        y1 = tl.where(has_second, y1, float("-inf"))
        second = (y1 > y0) | (y1 != y1)
        parts = (tl.where(second, y1, y0), tl.where(second, LEAD_W + 1, LEAD_W))
        if LEAD_W:
            parts = parts + (y1, tl.zeros(y1.shape, tl.int32))
    else:
        y1 = tl.where(has_second, y1, 0.0)
        parts = (tl.where(has_first, y0, 0.0) + y1,)
        if LEAD_W:
            parts = parts + (y1,)
    return parts


@triton.jit
def _merged(ours, theirs, MAXIMUM: tl.constexpr):
    """Two tuples of parts as one: of equal maxima the first in the window is taken."""
    both = ()
    if MAXIMUM:
        for i in tl.static_range(len(ours) // 2):
            a, b = ours[2 * i], theirs[2 * i]
            at, to = ours[2 * i + 1], theirs[2 * i + 1]
            taken = (b > a) | (b != b) | ((b == a) & (to < at))
            both = both + (tl.where(taken, b, a), tl.where(taken, to, at))
    else:
        for i in tl.static_range(len(ours)):
            both = both + (ours[i] + theirs[i],)
    return both


@triton.jit
def _moved(parts, places, MAXIMUM: tl.constexpr):
    """Parts whose places lie further on in the window."""
    if MAXIMUM:
        moved = ()
        for i in tl.static_range(len(parts) // 2):
            moved = moved + (parts[2 * i], parts[2 * i + 1] + places)
    else:
        moved = parts
    return moved


@triton.jit
def _after(part, pair, BLOCK_P: tl.constexpr, MAXIMUM: tl.constexpr):
    """Each pair's part of the pair before."""
    before = tl.maximum(tl.arange(0, BLOCK_P) - 1, 0)[:, None]
    before = before + tl.zeros(part[0].shape, tl.int32)
    value = tl.gather(part[0], before, 0)
    if MAXIMUM:
        value = tl.where(pair > 0, value, float("-inf"))
        found = (value, tl.gather(part[1], before, 0))
    else:
        found = (tl.where(pair > 0, value, 0.0),)
    return found


@triton.jit
def _load_part(sums, places, at, wanted, MAXIMUM: tl.constexpr):
    wanted = wanted & (at >= 0)
    if MAXIMUM:
        value = tl.load(sums + at, mask=wanted, other=float("-inf"))
        part = (value, tl.load(places + at, mask=wanted, other=0).to(tl.int32))
    else:
        part = (tl.load(sums + at, mask=wanted, other=0.0),)
    return part


@triton.jit
def _signs(y0, y1, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr):
    """A bit for each filter of each output of a pair: whether it is positive."""
    bit = 1 << (tl.arange(0, BLOCK_F) % WORD)[None, :]
    bits = tl.where(y0 > 0, bit, 0) + tl.where(y1 > 0, bit << WORD, 0)
    return tl.sum(tl.reshape(bits, (BLOCK_P, BLOCK_F // WORD, WORD)), 2)


@triton.jit
def _count(
    od, oh, ow, depth, height, width,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """How many outputs of the convolution a window holds."""
    count = num_in_bounds(ow, width, KERNEL[2], STRIDE[2], KERNEL[2] - STRIDE[2])
    count *= num_in_bounds(oh, height, KERNEL[1], STRIDE[1], KERNEL[1] - STRIDE[1])
    count *= num_in_bounds(od, depth, KERNEL[0], STRIDE[0], KERNEL[0] - STRIDE[0])
    return tl.maximum(count, 1)


@triton.jit(do_not_specialize=["samples", "tiles", *SIZES])
def conv_pool_grad_kernel(
    packed, grads, kept, sums, bias_sums,
    x_n, x_d, x_h, samples, depth, height, width,
    out_depth, out_height, out_width, filters, tiles, rows,
    CHANNELS: tl.constexpr, KERNEL_D: tl.constexpr, KERNEL_H: tl.constexpr, GROUP: tl.constexpr,
    ROW: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_Q: tl.constexpr,
    MAXIMUM: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, COUNTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, SLOPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Each program's sums of the gradients of weights and bias over its share of the outputs.

    It has one block of filters and one block of the kernel's planes.
    """
    N: tl.constexpr = GROUP * BLOCK_F
    PAIRS: tl.constexpr = GROUP // 2
    BLOCK_P: tl.constexpr = BLOCK_Q * PAIRS
    IN_BLOCK: tl.constexpr = BLOCK_K // ROW
    BLOCKS: tl.constexpr = (KERNEL_D + IN_BLOCK - 1) // IN_BLOCK
    STEP_D: tl.constexpr = STRIDE[0]
    STEP_H: tl.constexpr = STRIDE[1]
    TAIL: tl.constexpr = (KERNEL_H - 1 + STEP_H - 1) // STEP_H
    tile = tl.program_id(1) // BLOCKS
    block = tl.program_id(1) % BLOCKS
    k = tl.arange(0, BLOCK_K)
    n = tl.arange(0, N)
    f = (tile * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    there = (block * IN_BLOCK + k // ROW < KERNEL_D)[None, :]
    totals = ()
    for _ in tl.static_range(KERNEL_H):
        totals = totals + (tl.zeros((BLOCK_K, N), tl.float32),)
    bias_total = tl.zeros((BLOCK_P, BLOCK_F), tl.float32)
    across = tl.cdiv(out_width, BLOCK_P)
    down = tl.cdiv(out_height, rows)
    deep = min(out_depth * STEP_D, depth)
    for share in range(tl.program_id(0), samples * deep * down * across, tl.num_programs(0)):
        q = share % across * BLOCK_Q + tl.arange(0, BLOCK_Q)
        pair = (share % across * BLOCK_P + tl.arange(0, BLOCK_P))[:, None]
        oh0 = share // across % down * rows
        oh1 = min(oh0 + rows, out_height)
        d = share // across // down % deep
        sample = (share // across // down // deep).to(tl.int64)
        window = packed + sample * x_n + (d + block * IN_BLOCK).to(tl.int64) * x_d
        window = window + q[:, None] * (GROUP * CHANNELS) + (k // ROW * x_d + k % ROW)[None, :]
        above = ()  # the gradients of the rows above
        for _ in tl.static_range(KERNEL_H - 1):
            above = above + (tl.zeros((BLOCK_Q, N), packed.dtype.element_ty),)
        for t in range(oh0, oh1 + TAIL):
            for i in tl.static_range(STEP_H):
                row = t * STEP_H + i
                wanted = (t < oh1) & (row < height) & (f < filters)
                g0, g1 = _row_grads(
                    grads, kept, sample, d, t, i, pair, f, wanted, depth, height, width,
                    out_depth, out_height, out_width, filters,
                    MAXIMUM, KERNEL, STRIDE, COUNTS, SLOPE,
                )  # fmt: skip
                if (kept is not None) and (not MAXIMUM):
                    at = ((sample * depth + d) * height + row) * out_width + pair
                    at = (at * tiles + tile) * (BLOCK_F // WORD)
                    at = at + tl.arange(0, BLOCK_F // WORD)[None, :]
                    inside = (pair < out_width) & (t < oh1) & (row < height)
                    words = tl.load(kept + at, mask=inside, other=0)
                    g0, g1 = _scaled(g0, g1, words, SLOPE)
                g1 = tl.where(2 * pair + 1 < width, g1, 0.0)
                if HAS_BIAS:
                    bias_total += g0 + g1
                grad = tl.reshape(tl.permute(tl.join(g0, g1), (0, 2, 1)), (BLOCK_Q, N))
                above = above + (grad.to(packed.dtype.element_ty),)
                source = window + tl.minimum(row, height + KERNEL_H - 2) * x_h
                inputs = tl.trans(tl.load(source, mask=there, other=0))
                new = ()
                for j in tl.static_range(KERNEL_H):
                    new = new + (tl.dot(inputs, above[j], totals[j], input_precision=PRECISION),)
                totals = new
                above = above[1:]
    number = (tile * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    for j in tl.static_range(KERNEL_H):
        target = (number * KERNEL_H + KERNEL_H - 1 - j) * BLOCKS + block
        tl.store(sums + (target * BLOCK_K + k[:, None]) * N + n[None, :], totals[j])
    if HAS_BIAS:
        to = bias_sums + number * BLOCK_F + tl.arange(0, BLOCK_F)
        tl.store(to, tl.sum(bias_total, 0), mask=block == 0)


@triton.jit
def _row_grads(
    grads, kept, sample, d, t, i: tl.constexpr, pair, f, wanted,
    depth, height, width, out_depth, out_height, out_width, filters,
    MAXIMUM: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, COUNTS: tl.constexpr,
    SLOPE: tl.constexpr,
):  # fmt: skip
    """What the windows pass on to both outputs of pairs, in row ``i`` of those that ``t`` owns."""
    LEAD_D: tl.constexpr = KERNEL[0] - STRIDE[0]
    LEAD_H: tl.constexpr = KERNEL[1] - STRIDE[1]
    LEAD_W: tl.constexpr = KERNEL[2] - STRIDE[2]
    STEP_D: tl.constexpr = STRIDE[0]
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    WHOLE: tl.constexpr = KERNEL[0] * KH * KW
    ROWS: tl.constexpr = 1 + (LEAD_H if i == STRIDE[1] - 1 else 0)
    first = tl.zeros((pair.shape[0], f.shape[1]), tl.float32)
    second = tl.zeros((pair.shape[0], f.shape[1]), tl.float32)
    for jd in tl.static_range(1 + LEAD_D):
        od = d // STEP_D + jd
        in_depth = (od < out_depth) & ((jd == 0) | (d % STEP_D == STEP_D - 1))
        kd = (1 - jd) * (LEAD_D + d % STEP_D)
        for jh in tl.static_range(ROWS):
            oh = t + jh
            place = (kd * KH + (1 - jh) * (LEAD_H + i)) * KW
            start = ((sample * out_depth + od) * out_height + oh) * out_width * filters
            for jw in tl.static_range(1 + LEAD_W):
                ow = pair + jw
                inside = wanted & in_depth & (oh < out_height) & (ow < out_width)
                g = tl.load(grads + start + (ow * filters + f), mask=inside, other=0)
                g = g.to(tl.float32)
                if MAXIMUM:
                    code = tl.load(kept + start + (ow * filters + f), mask=inside, other=127)
                    code = code.to(tl.int32)
                    if SLOPE != 1:
                        g = tl.where(code < 128, g, g * SLOPE if SLOPE != 0 else 0.0)
                        code = code & 127
                    if jw == 0:
                        first += tl.where(code == place + LEAD_W, g, 0.0)
                        second += tl.where(code == place + LEAD_W + 1, g, 0.0)
                    else:
                        second += tl.where(code == place, g, 0.0)
                else:
                    if not COUNTS:
                        g /= _count(od, oh, ow, depth, height, width, KERNEL, STRIDE)
                    if jw == 0:
                        first += g
                    second += g
    if COUNTS and (not MAXIMUM):
        first *= 1.0 / WHOLE
        second *= 1.0 / WHOLE
    return first, second


@triton.jit
def _scaled(g0, g1, words, SLOPE: tl.constexpr):
    """The gradients before the activation, of which ``words`` has the signs."""
    P: tl.constexpr = words.shape[0]
    NUM: tl.constexpr = words.shape[1]
    bits = words[:, :, None] >> tl.arange(0, WORD)[None, None, :]
    bits = tl.reshape(bits, (P, NUM * WORD))
    g0 = tl.where((bits & 1) != 0, g0, g0 * SLOPE if SLOPE != 0 else 0.0)
    g1 = tl.where(((bits >> WORD) & 1) != 0, g1, g1 * SLOPE if SLOPE != 0 else 0.0)
    return g0, g1
