"use strict";
(() => {
const data = JSON.parse(document.getElementById("trace-data").textContent);
const order = Object.keys(data.colours);
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const seconds = (x) =>
  !x ? "0 s" : x >= 100 ? x.toFixed(0) + " s" : x >= 1 ? x.toPrecision(3) + " s"
  : x >= 1e-3 ? (x * 1e3).toPrecision(3) + " ms" : (x * 1e6).toPrecision(3) + " µs";
const bytes = (x) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let power = 0;
  while (x >= 1024 && power < units.length - 1) { x /= 1024; power += 1; }
  return (power ? x.toFixed(1) : x.toFixed(0)) + " " + units[power];
};
const percent = (x) => (100 * x).toFixed(x >= 0.1 || !x ? 0 : 1) + "%";
const shown = (name) => name.replace("_", "-");
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const tip = make("div", { class: "tip", hidden: "" });
document.body.append(tip);
const tell = (event, text) => {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = event.clientY + 16 + "px";
};

// Intervals are numbers in turn: a gap, a length, a gap, a length.
const unpack = (packed, unit) => {
  const found = new Float64Array(packed.length);
  let at = 0;
  for (let i = 0; i < packed.length; i++) { at += packed[i]; found[i] = at * unit; }
  return found;
};
const unpackLane = (lane, unit) =>
  lane.filled ? { filled: lane.filled } : { ends: unpack(lane.intervals, unit) };

/** The shares of `num` columns between `start` and `stop` that a lane fills. */
function filled(lane, start, stop, num, whole) {
  const found = new Float64Array(num), width = (stop - start) / num;
  if (lane.filled) {
    const count = lane.filled.length, column = whole / count;
    for (let i = 0; i < num; i++) {
      const from = Math.floor((start + i * width) / column);
      const to = Math.max(from + 1, Math.ceil((start + (i + 1) * width) / column - 1e-9));
      let sum = 0;
      for (let j = Math.max(0, from); j < Math.min(count, to); j++) sum += lane.filled[j];
      found[i] = sum / (to - from) / 100;
    }
    return found;
  }
  const ends = lane.ends;
  let low = 0, high = ends.length / 2;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[2 * middle + 1] <= start) low = middle + 1; else high = middle;
  }
  for (let i = low; i < ends.length / 2 && ends[2 * i] < stop; i++) {
    const from = Math.max(start, ends[2 * i]), to = Math.min(stop, ends[2 * i + 1]);
    const last = Math.min(num - 1, Math.floor((to - start) / width));
    for (let c = Math.max(0, Math.floor((from - start) / width)); c <= last; c++) {
      const a = start + c * width;
      found[c] += Math.max(0, Math.min(to, a + width) - Math.max(from, a)) / width;
    }
  }
  return found;
}

/** Rows of time that are zoomed by the wheel and moved by dragging. */
class Timeline {
  constructor(whole, options = {}) {
    this.whole = whole;
    this.start = 0;
    this.stop = whole;
    this.rows = [];
    this.marks = options.marks || [];
    this.onView = options.onView || (() => {});
    this.canvas = make("canvas", { class: "timeline", tabindex: "0", role: "img",
      "aria-label": options.label || "timeline" });
    const button = (text, title, act) => {
      const made = make("button", { type: "button", title }, text);
      made.addEventListener("click", act);
      return made;
    };
    const middle = () => (this.start + this.stop) / 2;
    this.node = make("div", { class: "zoomed" },
      make("div", { class: "tools" },
        button("+", "zoom in", () => this.zoom(0.5, middle())),
        button("−", "zoom out", () => this.zoom(2, middle())),
        button("all", "see all of it", () => this.view(0, this.whole)),
        make("span", { class: "faint" }, "wheel: zoom, drag: move, double click: all")),
      make("div", { class: "scroll" }, this.canvas));
    this.listen();
  }
  view(start, stop) {
    const width = Math.min(this.whole, Math.max(this.whole * 1e-7, stop - start));
    this.start = Math.max(0, Math.min(this.whole - width, start));
    this.stop = this.start + width;
    this.draw();
    this.onView(this.start, this.stop);
  }
  zoom(factor, around) {
    this.view(around - (around - this.start) * factor, around + (this.stop - around) * factor);
  }
  get label() { return Math.min(150, this.canvas.clientWidth * 0.25); }
  get note() { return this.rows.some((row) => row.note) ? 110 : 4; }
  time(event) {
    const box = this.canvas.getBoundingClientRect();
    const width = box.width - this.label - this.note;
    return this.start + (event.clientX - box.left - this.label) / width * (this.stop - this.start);
  }
  listen() {
    const canvas = this.canvas;
    let dragged = null;
    canvas.addEventListener("wheel", (event) => {
      if (event.shiftKey) return;
      event.preventDefault();
      this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 200))), this.time(event));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      dragged = { at: this.time(event), start: this.start, stop: this.stop };
      try { canvas.setPointerCapture(event.pointerId); } catch { /* made by a program */ }
    });
    canvas.addEventListener("pointermove", (event) => {
      if (dragged) {
        const moved = this.time(event) - dragged.at;
        this.view(this.start - moved, this.stop - moved);
      }
      tell(event, this.textAt(event));
    });
    for (const name of ["pointerup", "pointercancel"])
      canvas.addEventListener(name, () => { dragged = null; });
    canvas.addEventListener("pointerleave", (event) => tell(event, ""));
    canvas.addEventListener("dblclick", () => this.view(0, this.whole));
    canvas.addEventListener("keydown", (event) => {
      const width = this.stop - this.start, middle = (this.start + this.stop) / 2;
      if (event.key === "+") this.zoom(0.5, middle);
      else if (event.key === "-") this.zoom(2, middle);
      else if (event.key === "ArrowLeft") this.view(this.start - width / 4, this.stop - width / 4);
      else if (event.key === "ArrowRight") this.view(this.start + width / 4, this.stop + width / 4);
      else return;
      event.preventDefault();
    });
  }
  textAt(event) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top;
    const row = this.rows.find((each) => y >= each.top && y < each.top + each.height);
    return row ? this.rowText(row, this.time(event)) : "";
  }
  rowText(row, at) {
    if (at < this.start || at > this.stop) return row.label;
    if (row.pieces) {
      const slack = (this.stop - this.start) / 400;
      const hit = row.pieces.find(([start, length]) =>
        at >= start - slack && at <= start + length + slack);
      return hit ? `${row.label}: ${hit[2] || ""} ${seconds(hit[1])}` : row.label;
    }
    const width = (this.stop - this.start) / 400;
    const parts = row.stack
      .map(([name, lane]) =>
        [name, filled(lane, at - width / 2, at + width / 2, 1, this.whole)[0]])
      .filter(([, share]) => share > 0.005)
      .map(([name, share]) => `${shown(name)} ${percent(share)}`);
    return `${row.label} at ${seconds(at)}: ${parts.join(", ") || "nothing"}`;
  }
  draw() {
    const canvas = this.canvas, ratio = devicePixelRatio || 1;
    let heights = 15;
    for (const row of this.rows) {
      row.top = heights + row.space;
      heights = row.top + row.height;
    }
    heights += 3;
    canvas.style.height = heights + "px";
    const wide = canvas.clientWidth || 900;
    canvas.width = Math.round(wide * ratio);
    canvas.height = Math.round(heights * ratio);
    canvas.dataset.start = this.start;
    canvas.dataset.stop = this.stop;
    canvas.dataset.rows = this.rows.length;
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    c.font = "12px system-ui, sans-serif";
    c.textBaseline = "middle";
    const left = this.label, width = wide - left - this.note;
    const place = (t) => left + (t - this.start) / (this.stop - this.start) * width;
    this.drawAxis(c, place, left, left + width, heights);
    for (const row of this.rows) {
      const top = row.top;
      c.fillStyle = ink("--ink");
      c.fillText(row.label, 0, top + row.height / 2, left - 8);
      if (row.note) c.fillText(row.note, left + width + 8, top + row.height / 2, this.note - 8);
      if (row.pieces) this.drawPieces(c, row, place, left, width, top);
      else this.drawStack(c, row, left, Math.max(1, Math.floor(width)), top);
    }
  }
  drawAxis(c, place, left, right, bottom) {
    const step = tickStep((this.stop - this.start) / 6);
    c.fillStyle = ink("--faint");
    c.strokeStyle = ink("--line");
    const line = (t) => {
      c.beginPath(); c.moveTo(place(t), 14); c.lineTo(place(t), bottom); c.stroke();
    };
    for (let k = Math.ceil(this.start / step); k * step <= this.stop; k++) {
      line(k * step);
      if (place(k * step) < right - 30) c.fillText(tickText(k * step, step), place(k * step) + 2, 7);
    }
    c.strokeStyle = ink("--ink");
    for (const mark of this.marks)
      if (mark >= this.start && mark <= this.stop) line(mark);
  }
  drawStack(c, row, left, num, top) {
    const low = new Float64Array(num);
    for (const [name, lane] of row.stack) {
      const shares = filled(lane, this.start, this.stop, num, this.whole);
      c.fillStyle = data.colours[name];
      for (let i = 0; i < num; i++) {
        if (shares[i] <= 0) continue;
        const high = Math.min(1, low[i] + shares[i]);
        const tall = Math.max(0.6, (high - low[i]) * row.height);
        c.fillRect(left + i, top + (1 - low[i]) * row.height - tall, 1, tall);
        low[i] = high;
      }
    }
  }
  drawPieces(c, row, place, left, width, top) {
    c.fillStyle = data.colours[row.name];
    for (const [start, length] of row.pieces) {
      const from = Math.max(left, place(start)), to = Math.min(left + width, place(start + length));
      if (to < left || from > left + width) continue;
      c.fillRect(from, top, Math.max(0.7, to - from - (to - from > 3 ? 0.6 : 0)), row.height);
    }
  }
}
const tickStep = (least) => {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((m) => m * power).find((each) => each >= least);
};
const tickText = (t, step) => {
  const [factor, unit] = step >= 1 ? [1, "s"] : step >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(step * factor) + 1e-9));
  return (t * factor).toFixed(digits) + " " + unit;
};

/** Lines over time, drawn for what the timeline shows. */
class Lines {
  constructor(whole) {
    this.whole = whole;
    this.series = {};
    this.view = [0, whole];
    this.canvas = make("canvas", { class: "lines", role: "img", "aria-label": "bandwidth" });
    this.key = make("p", { class: "key faint" });
    this.node = make("div", {}, this.key, this.canvas);
  }
  draw() {
    const names = Object.keys(this.series), canvas = this.canvas, ratio = devicePixelRatio || 1;
    // Lines of one category have its colour, and dashes tell them apart.
    const category = (name) => name.split(" ")[0];
    const colour = (name) => data.colours[category(name)];
    const dash = (name) => Lines.dashes[Math.min(Lines.dashes.length - 1,
      names.filter((each) => category(each) === category(name)).indexOf(name))];
    this.key.replaceChildren(...names.flatMap((name) => {
      const [on, off] = dash(name).length ? dash(name) : [1, 0];
      const stripes = `${colour(name)} 0 ${on}px, transparent ${on}px ${on + off}px`;
      return [make("span", { style: `background:repeating-linear-gradient(90deg, ${stripes})`,
        "data-colour": colour(name) }), shown(name)];
    }));
    const wide = canvas.clientWidth || 900, tall = 170;
    canvas.width = wide * ratio;
    canvas.height = tall * ratio;
    canvas.dataset.lines = names.length;
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    c.font = "12px system-ui, sans-serif";
    const left = Math.min(150, wide * 0.25), width = wide - left - 4, bottom = tall - 20;
    const most = Math.max(1, ...names.map((name) => Math.max(...this.series[name])));
    const [start, stop] = this.view;
    c.fillStyle = ink("--faint");
    c.strokeStyle = ink("--line");
    for (const part of [0, 0.5, 1]) {
      const y = bottom - part * (bottom - 12);
      c.beginPath(); c.moveTo(left, y); c.lineTo(left + width, y); c.stroke();
      c.fillText(bytes(part * most) + "/s", 30, y + 4);
    }
    c.fillText(seconds(start), left, tall - 4);
    c.fillText(seconds(stop), left + width - 40, tall - 4);
    names.forEach((name) => {
      const values = this.series[name], column = this.whole / values.length;
      c.strokeStyle = colour(name);
      c.setLineDash(dash(name));
      c.lineWidth = 1.5;
      c.beginPath();
      values.forEach((value, j) => {
        const x = (t) => left + (Math.max(start, Math.min(stop, t)) - start) / (stop - start) * width;
        const y = bottom - value / most * (bottom - 12);
        if ((j + 1) * column < start || j * column > stop) return;
        c.lineTo(x(j * column), y);
        c.lineTo(x((j + 1) * column), y);
      });
      c.stroke();
    });
  }
}
Lines.dashes = [[], [6, 3], [2, 3], [9, 6], [1, 5]];

function showRun(run, section) {
  const find = (name) => section.querySelector("." + name);
  const unit = run.unit_seconds, drawn = [];
  const select = find("rank");
  if (run.ranks.length > 1) select.append(make("option", { value: "all" }, "all, on average"));
  for (const rank of run.ranks)
    select.append(make("option", { value: rank.rank }, `rank ${rank.rank} (${rank.host})`));
  for (const rank of run.ranks)
    for (const set of [rank.exposed, rank.busy])
      for (const name of Object.keys(set)) set[name] = unpackLane(set[name], unit);
  const inOrder = (set) => order.filter((name) => name in set).map((name) => [name, set[name]]);

  const lines = new Lines(run.seconds);
  const timeline = new Timeline(run.seconds, { label: "timeline of the run", marks: run.marks,
    onView: (start, stop) => { lines.view = [start, stop]; lines.draw(); } });
  find("bandwidth").append(lines.node);
  find("whole").append(timeline.node);
  drawn.push(lines, timeline);
  let iteration = null;
  if (run.iteration) {
    iteration = new Timeline(run.iteration.seconds, { label: "one iteration" });
    find("iteration").append(iteration.node);
    drawn.push(iteration);
  }

  const epochSelect = find("epoch");
  epochSelect.append(make("option", { value: "total" }, "all epochs"),
    ...run.mean.epochs.map((each) => make("option", { value: each.epoch }, `epoch ${each.epoch}`)));
  if (run.mean.outside.seconds > 0)
    epochSelect.append(make("option", { value: "outside" }, "outside of epochs"));

  function showBars(periods) {
    const most = Math.max(...periods.map((each) => each.seconds), 1e-12);
    const rows = periods.map((each) => {
      const bar = make("div", { class: "bar", style: `width:${100 * each.seconds / most}%` });
      for (const name of order) {
        const share = each.categories[name];
        if (!share || !(share[1] > 0)) continue;
        const text = `${shown(name)}: ${seconds(share[1])}, ${percent(share[1] / each.seconds)}`;
        const part = make("div", { style: `flex:${share[1] / each.seconds} 0 0;` +
          `background:${data.colours[name]}`, "data-category": name });
        part.addEventListener("pointermove", (event) => tell(event, text));
        part.addEventListener("pointerleave", (event) => tell(event, ""));
        bar.append(part);
      }
      const label = each.epoch === undefined ? "outside" : `epoch ${each.epoch}`;
      return make("div", { class: "epoch-row" }, make("span", {}, label), make("div", {}, bar),
        make("span", { class: "faint" }, seconds(each.seconds)));
    });
    find("epochs").replaceChildren(...rows);
    const used = order.filter((name) => periods.some((each) => (each.categories[name] || [])[1] > 0));
    find("epoch-key").replaceChildren(...used.flatMap((name) =>
      [make("span", { style: `background:${data.colours[name]}` }), shown(name)]));
  }
  function showTable(period) {
    const rows = inOrder(period.categories).filter(([, share]) => share[0] > 0 || share[3] > 0);
    find("categories").replaceChildren(...rows.map(([name, [all, exposed, threads, nbytes]]) => {
      const numbers = [seconds(all), seconds(exposed), seconds(Math.max(0, all - exposed)),
        percent(exposed / period.seconds || 0), seconds(threads), nbytes ? bytes(nbytes) : "",
        nbytes && all ? bytes(nbytes / all) + "/s" : ""];
      return make("tr", {}, make("td", {}, shown(name)),
        ...numbers.map((text) => make("td", { class: "number" }, text)));
    }));
  }
  function showThreads(ranks) {
    const rows = ranks.flatMap((rank) => rank.threads.map((thread) => [rank, thread]));
    const most = Math.max(1e-12, ...rows.map(([, thread]) =>
      Object.values(thread.seconds).reduce((sum, each) => sum + each, 0)));
    find("threads").replaceChildren(...rows.slice(0, 200).map(([rank, thread]) => {
      const bar = make("div", { class: "bar" });
      for (const [name, time] of inOrder(thread.seconds))
        bar.append(make("div", { style: `width:${100 * time / most}%;` +
          `background:${data.colours[name]}`, title: `${shown(name)}: ${seconds(time)}` }));
      const io = ["stage", "read", "decode", "exchange"].reduce(
        (sum, name) => sum + (thread.seconds[name] || 0), 0);
      return make("tr", {}, make("td", {}, `rank ${rank.rank}`), make("td", {}, thread.name),
        make("td", { class: "number" }, seconds(io)),
        make("td", { class: "number" }, seconds(thread.seconds.compute || 0)),
        make("td", { class: "time" }, bar));
    }));
  }
  function rowsOf(rank) {
    const rows = [{ label: `rank ${rank.rank}: loop`, height: 26, space: 3,
      stack: inOrder(rank.exposed) }];
    for (const [name, lane] of inOrder(rank.busy))
      rows.push({ label: shown(name), height: 14, space: 3, stack: [[name, lane]] });
    return rows;
  }
  function iterationRows(ranks) {
    return ranks.flatMap((rank) => rank.rows.map((row, i) => ({
      label: (i ? "" : `rank ${rank.rank} `) + shown(row.name) + (rank.on_device ? " (GPU)" : ""),
      name: row.name, height: 14, space: i || rank === ranks[0] ? 3 : 12, pieces: row.pieces,
      note: row.name === "compute" ? percent(row.exposed / rank.seconds) + " of it"
        : row.seconds ? percent(1 - row.exposed / row.seconds) + " hidden" : "none",
    })));
  }
  function update() {
    const chosen = select.value, all = chosen === "all";
    const ranks = run.ranks.filter((rank) => all || String(rank.rank) === chosen);
    const periods = all ? run.mean : ranks[0];
    section.dataset.rank = chosen;
    showBars(periods.outside.seconds > 0.001 * run.seconds
      ? [...periods.epochs, periods.outside] : periods.epochs);
    const which = epochSelect.value;
    showTable(which === "total" ? periods.total : which === "outside" ? periods.outside
      : periods.epochs.find((each) => String(each.epoch) === which) || { seconds: 0, categories: {} });
    showThreads(ranks);
    lines.series = (all ? null : run.bandwidth.ranks[chosen]) || run.bandwidth.total;
    timeline.rows = ranks.length === 1 ? rowsOf(ranks[0]) : ranks.map((rank) => rowsOf(rank)[0]);
    if (iteration)
      iteration.rows = iterationRows(
        run.iteration.ranks.filter((rank) => all || String(rank.rank) === chosen));
    for (const each of drawn) each.draw();
  }
  select.addEventListener("change", update);
  epochSelect.addEventListener("change", update);
  addEventListener("resize", update);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  update();
}
data.runs.forEach((run, i) => showRun(run, document.getElementById(`run-${i}`)));
document.documentElement.dataset.ready = "yes";
})();
