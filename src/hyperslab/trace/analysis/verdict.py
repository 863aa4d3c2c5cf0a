"""The verdict: what a run waited for, and what would help, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hyperslab.pages import shown_seconds, shown_share
from hyperslab.partial import shown_nbytes
from hyperslab.trace.analysis.analysis import Analysis
from hyperslab.trace.analysis.loop import READERS
from hyperslab.trace.analysis.periods import IO, Period
from hyperslab.trace.analysis.replay import WhatIf, gain_of, readers_to_hide, seen_at_once
from hyperslab.trace.analysis.stragglers import Straggler
from hyperslab.trace.span import Category, Tier

LEAST_SHARE = 0.03
"""Of an epoch: waiting for less is not worth a word."""
LEAST_OTHER = 0.15
MOST_SENTENCES = 4
START_SHARE = 0.5
"""Of the waiting of an epoch: where more is before its first batch, no reader hides it."""
MOST_NAMES = 3
"""Spans of a user's own code."""
NO_GAIN = 0.1
"""What one more read at once must bring of what the first does, or readers are no help."""

WORDS = {
    Category.read: "reads",
    Category.decode: "decoding",
    Category.stage: "staging",
    Category.exchange: "samples of other ranks",
    Category.wait: "batches that no recorded work explains",
    Category.copy: "copies to the device",
    Category.halo: "halos",
    Category.all_reduce: "sums over ranks",
    Category.checkpoint: "checkpoints",
    Category.evaluation: "evaluation",
    Category.optimizer: "the optimizer",
    Category.compute: "computing",
    Category.user: "code of its own",
    Category.other: "what no span tells of",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that takes time."""

    text: str
    seconds: float
    """Of all epochs."""
    would: str = ""
    """How long the run would take without it: a sentence."""


def verdict(findings: list[Finding]) -> str:
    """Few sentences: what there is, and of the first of it what the run would be without it."""
    told = findings[:MOST_SENTENCES]
    left = MOST_SENTENCES - len(told)
    sentences = []
    for finding in told:
        sentences.append(finding.text)
        if finding.would and left:
            sentences.append(finding.would)
            left -= 1
    return " ".join(sentences)


def find(analysis: Analysis, what_ifs: list[WhatIf], stragglers: list[Straggler]) -> list[Finding]:
    """What takes time other than computing, and who is late: what costs the most first."""
    if not analysis.num_spans:
        return [Finding("Nothing was recorded.", 0.0)]
    if not any(rank.knows_loop for rank in analysis.ranks):
        return [_reads_alone(analysis)]
    found = [
        *_samples(analysis, what_ifs),
        *_own_code(analysis),
        *_messages(analysis, what_ifs),
        *_others(analysis),
    ]
    found.sort(key=lambda each: -each.seconds)
    found += _untold(analysis)
    late = [_late(each, what_ifs) for each in stragglers[:2]]
    saves_most = max(what_ifs, key=lambda each: each.saved_seconds, default=None)
    if late and saves_most and saves_most.name == "even_ranks":
        found = [*late, *found]
    else:
        rest = MOST_SENTENCES - len(late)
        found = [*found[:rest], *late, *found[rest:]]
    return found or [_nothing(analysis)]


def _who(analysis: Analysis) -> str:
    if any(rank.has_device_times for rank in analysis.ranks):
        return "The GPU" if len(analysis.ranks) == 1 else "GPUs"
    return "The loop" if len(analysis.ranks) == 1 else "Ranks"


def _nothing(analysis: Analysis) -> Finding:
    share = analysis.total.share(Category.compute)
    rest = [
        f"{WORDS[each]} {shown_share(analysis.total.share(each))}"
        for each in _largest(analysis.total)
        if each != Category.compute and analysis.total.share(each) >= 0.01
    ]
    if share < 0.01:
        told = f" went to {', '.join(rest[:3])}" if rest else " is not known"
        return Finding(f"Nothing computes, and nothing is waited for: the time{told}.", 0.0)
    among = f" ({', '.join(rest[:3])})" if rest else ""
    return Finding(f"Hardly anything is waited for: {shown_share(share)} is computing{among}.", 0.0)


def _reads_alone(analysis: Analysis) -> Finding:
    """Of programs of which only the opens and reads were recorded."""
    total = analysis.total
    seconds = total.exposed(*IO)
    nbytes = sum(total.categories[each].nbytes for each in READERS if each in total.categories)
    return Finding(
        f"Files were read in {shown_share(total.share(*IO))} of the time "
        f"({shown_seconds(seconds)} of {shown_seconds(total.seconds)}), "
        f"{shown_nbytes(nbytes)} in all. What the program did meanwhile was not recorded: "
        "hyperslab.trace.steps(batches) around its loop tells what it waited for.",
        seconds,
    )


def _largest(period: Period, *among: Category) -> list[Category]:
    """Categories by what was exposed of them, the most first."""
    chosen = among or tuple(period.categories)
    return sorted(chosen, key=lambda each: -period.exposed(each))


# Samples


def _samples(analysis: Analysis, what_ifs: list[WhatIf]) -> Iterator[Finding]:
    shares = {number: period.share(*IO) for number, period in analysis.epochs.items()}
    if not shares or max(shares.values()) < LEAST_SHARE:
        return
    worst = max(shares, key=lambda number: (shares[number], -number))
    others = [share for number, share in shares.items() if number != worst]
    period = analysis.epochs[worst]
    first = _largest(period, *IO)[0]
    alike = bool(others) and min(others) > 0.7 * shares[worst]
    if alike:
        period = analysis.total
        first = _largest(period, *IO)[0]
        when = "the time"
    else:
        when = f"epoch {worst}"
    text = (
        f"{_who(analysis)} waited {shown_share(period.share(*IO))} of {when} for "
        f"{_waited_for(analysis, period)} ({shown_seconds(period.exposed(*IO))} of "
        f"{shown_seconds(period.seconds)})"
    )
    if others and not alike:
        rest = [analysis.epochs[number] for number in shares if number != worst]
        seconds = sum(each.seconds for each in rest)
        share = sum(each.exposed(*IO) for each in rest) / seconds if seconds else 0.0
        which = "later epochs" if worst == min(shares) else "the others"
        text += f", {shown_share(share)} of {which}"
    recurs = alike or worst != min(shares)
    advice = _advice(analysis, first, worst, recurs=recurs)
    yield Finding(f"{text}{advice}.", analysis.total.exposed(*IO), _would(what_ifs, "io_free"))


def _waited_for(analysis: Analysis, period: Period) -> str:
    """What makes up most of it, with shares where there are several."""
    if not any(each in analysis.total.categories for each in READERS):
        return "batches"
    whole = period.exposed(*IO)
    parts = [each for each in _largest(period, *IO) if period.exposed(each) >= 0.1 * whole]
    if len(parts) == 1:
        return WORDS[parts[0]]
    told = [f"{shown_share(period.share(each))} {WORDS[each]}" for each in parts]
    return f"samples: {', '.join(told)}"


def _advice(analysis: Analysis, category: Category, epoch: int, *, recurs: bool) -> str:
    """What would hide it, as far as the trace tells; ``recurs``: also after the first epoch."""
    if category is Category.wait and not any(c in analysis.total.categories for c in READERS):
        return "; what makes batches was not recorded, hyperslab.span in the data set tells"
    if _first_step_share(analysis, epoch) > START_SHARE:
        return "; most of it is for the first batch of an epoch, ahead of which nothing is read"
    if category is Category.exchange:
        return '; shuffle="local" would keep samples where they are'
    if category is Category.wait:
        return "; what readers did then is not known, hyperslab.span in the data set tells"
    ways, why_not, again = [], "", category is not Category.decode and _reads_again(analysis)
    if not all(rank.num_readers for rank in analysis.ranks):
        ways.append("threads that read ahead of the loop")
    elif readers := readers_to_hide(analysis, epoch):
        ways.append(f"{readers} more reader thread{'s' * (readers > 1)} a rank")
    elif gain_of(analysis.reading) < NO_GAIN:
        why_not = f"; more reader threads would not help: {_side_by_side(analysis)}"
    if category is Category.decode:
        ways.append("lighter compression (hyperslab data repack)")
    elif recurs and again:
        ways.append("store=memory")
    elif not ways and category is Category.read:
        ways.append("files on the nodes' own disks (hyperslab data stage)")
    if not ways:
        return why_not
    later = ", and store=memory that of later epochs" if not recurs and again else ""
    return f"; {' or '.join(ways)} would hide it{later}{why_not}"


def _first_step_share(analysis: Analysis, epoch: int) -> float:
    """Of what an epoch waited for samples: before its first batch."""
    first = whole = 0.0
    for rank in analysis.ranks:
        of_epoch = rank.steps.epoch == epoch
        if rank.has_steps and of_epoch.any():
            waited = sum(rank.steps.exposed[each] for each in IO if each in rank.steps.exposed)
            waited = np.broadcast_to(waited, of_epoch.shape)[of_epoch]
            first += float(waited[0])
            whole += float(waited.sum())
    return first / whole if whole else 0.0


def _side_by_side(analysis: Analysis) -> str:
    few, *_, many = seen_at_once(analysis.reading)
    return (
        f"{many.num_reads} reads at once bring {shown_nbytes(many.rate)}/s, "
        f"{few.num_reads} {shown_nbytes(few.rate)}/s"
    )


def _reads_again(analysis: Analysis) -> bool:
    """Whether later epochs read from files as much as the first, and wait for it."""
    later = [*analysis.epochs.values()][1:]
    if all(period.share(*IO) < LEAST_SHARE for period in later):
        return False
    read = [
        period.categories[Category.read].nbytes if Category.read in period.categories else 0
        for period in analysis.epochs.values()
    ]
    has_store = any(
        name.endswith((Tier.memory.name, Tier.peer.name)) for name in analysis.bandwidth.total
    )
    is_ours = Category.delay in analysis.total.categories  # only loaders of hyperslab record it
    return is_ours and len(read) > 1 and max(read[1:]) > 0.5 * read[0] > 0 and not has_store


def _would(what_ifs: list[WhatIf], name: str) -> str:
    for each in what_ifs:
        if each.name == name and each.saved_share >= 0.01:
            before = shown_seconds(each.seconds + each.saved_seconds)
            words = each.words[0].upper() + each.words[1:]
            return f"{words}, the run would take {shown_seconds(each.seconds)}, not {before}."
    return ""


# Messages, and the rest


def _messages(analysis: Analysis, what_ifs: list[WhatIf]) -> Iterator[Finding]:
    total = analysis.total
    both = [Category.halo, Category.all_reduce]
    if total.share(*both) < LEAST_SHARE:
        return
    parts = []
    for category in _largest(total, *both):
        share = total.categories.get(category)
        if share and share.seconds and total.share(category) >= 0.005:
            hidden = shown_share(share.hidden_seconds / share.seconds)
            parts.append(
                f"{WORDS[category]} {shown_share(total.share(category))} ({hidden} of them hidden)"
            )
    text = f"{_who(analysis)} waited {shown_share(total.share(*both))} of the time for messages: "
    would = _would(what_ifs, "network_free")
    yield Finding(f"{text}{', '.join(parts)}.", total.exposed(*both), would)


def _own_code(analysis: Analysis) -> Iterator[Finding]:
    """Spans of a user that the loop waited for, or went through itself."""
    total = analysis.total
    share = total.share(Category.user)
    if share < LEAST_SHARE:
        return
    names: dict[str, float] = {}
    for rank in analysis.ranks:
        for name, seconds in rank.own_code.items():
            names[name] = names.get(name, 0.0) + seconds / (len(analysis.ranks) * total.seconds)
    largest = sorted(names.items(), key=lambda each: -each[1])[:MOST_NAMES]
    told = ", ".join(f"{name} {shown_share(part)}" for name, part in largest)
    waited = sum(float(rank.steps.making.sum()) for rank in analysis.ranks) / len(analysis.ranks)
    text = f"{shown_share(share)} of the time went to code of its own ({told})"
    if waited > 0.5 * total.exposed(Category.user):
        share = waited / total.seconds
        text = f"{_who(analysis)} waited {shown_share(share)} of the time for code that makes "
        text += f"batches ({told}); done sooner, ahead of the loop, it could be hidden"
    yield Finding(f"{text}.", total.exposed(Category.user))


_ADVICE = {
    Category.copy: "pinned buffers and a larger prefetch would hide it",
    Category.checkpoint: "fewer of them would do",
    Category.evaluation: "a larger eval_batch_size, or fewer evaluations, would shorten it",
    Category.optimizer: "a fused optimizer would shorten it",
}


def _others(analysis: Analysis) -> Iterator[Finding]:
    total = analysis.total
    for category, advice in _ADVICE.items():
        share = total.share(category)
        if share >= 2 * LEAST_SHARE:
            text = f"{shown_share(share)} of the time went to {WORDS[category]}; {advice}."
            yield Finding(text, total.exposed(category))


def _untold(analysis: Analysis) -> Iterator[Finding]:
    """It comes after all that is told."""
    share = analysis.total.share(Category.other)
    if share >= LEAST_OTHER:
        yield Finding(
            f"No span tells of {shown_share(share)} of the time; "
            'hyperslab.span("...") around code of your own does.',
            analysis.total.exposed(Category.other),
        )


def _late(straggler: Straggler, what_ifs: list[WhatIf]) -> Finding:
    where = f" (on {straggler.host})" if straggler.host else ""
    times = ""
    if straggler.usual_seconds > 0:
        times = f", {straggler.seconds / straggler.usual_seconds:.2g} times as much as on others"
    took = f"{shown_seconds(straggler.seconds)} went to {WORDS[straggler.category]}{times}"
    waits = ""
    if straggler.others_wait_seconds > 0.3 * straggler.lag_seconds:
        waits = f"; these waited {shown_seconds(straggler.others_wait_seconds)} for it"
    return Finding(
        f"Rank {straggler.rank}{where} is a straggler: {took}{waits}.",
        straggler.lag_seconds,
        _would(what_ifs, "even_ranks"),
    )
