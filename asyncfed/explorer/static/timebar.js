// The whole run in a strip: how much was sent when, the window that is looked at, and the cursor; and it plays.
import { Sheet, framed } from "./canvas.js";
import { PHASE_COLOURS, STATUSES, ink } from "./colours.js";
import { make, number } from "./words.js";

const SPEEDS = [["0.25", "¼×"], ["1", "1×"], ["4", "4×"], ["16", "16×"]];
const LASTS = 20000; // milliseconds that the window takes to play

export class TimeBar {
  constructor(root, store, source) {
    Object.assign(this, { store, source, speed: 1 });
    this.button = make("button", { type: "button", class: "play", "aria-label": "Play", click: () => this.toggle() }, "▶");
    const speed = make("select", { "aria-label": "Speed", change: () => { this.speed = Number(speed.value); } },
      ...SPEEDS.map(([value, words]) => make("option", { value, selected: value === "1" }, words)));
    this.words = make("output", { class: "clock" });
    const zoom = (factor) => { const [from, to] = store.looked; store.zoom(factor, store.cursor ?? (from + to) / 2); };
    const controls = make("div", { class: "controls" }, this.button, speed, this.words,
      make("span", { class: "zooms" },
        make("button", { type: "button", "aria-label": "Zoom in", title: "Zoom in (+)", click: () => zoom(0.5) }, "+"),
        make("button", { type: "button", "aria-label": "Zoom out", title: "Zoom out (−)", click: () => zoom(2) }, "−"),
        make("button", { type: "button", title: "Look at the whole run (0)", click: () => store.set({ window: null }) }, "whole run")));
    const track = make("div", { class: "sheet track" });
    root.append(controls, track);
    this.sheet = new Sheet(track, "Time: the whole run");
    this.draw = framed(() => this.paint());
    this.sheet.resized = this.draw;
    this.drag();
    store.on(["window", "cursor", "theme", "runs", "shown"], () => this.draw());
    store.on(["runs", "shown"], () => this.load());
    store.on(["playing"], () => this.play());
    this.load();
  }

  async load() {
    const run = this.store.runs[this.store.shown[0]];
    const [from, to] = [run.from, run.to];
    try {
      [this.table, this.marks] = await Promise.all([this.source.get(run, "window", { from, to: to * 1.000001 + 1e-9, low: 0, high: run.nodes, bins: 512 }), this.source.get(run, "marks")]);
      this.bars = histogram(this.table, from, to);
    } catch {
      this.bars = null;
    }
    this.draw();
  }

  x(time) {
    const [from, to] = this.store.span;
    return 8 + ((time - from) / (to - from)) * (this.sheet.width - 16);
  }

  time(x) {
    const [from, to] = this.store.span;
    return Math.max(from, Math.min(to, from + ((x - 8) / (this.sheet.width - 16)) * (to - from)));
  }

  /** Drag to look at a part; an end of the window to move it; click to set the cursor. */
  drag() {
    const { canvas } = this.sheet;
    let begun = null;
    canvas.addEventListener("pointerdown", (event) => {
      const [x] = this.sheet.at(event);
      const ends = this.store.window?.map((time) => this.x(time)) ?? [];
      const end = ends.findIndex((place) => Math.abs(place - x) < 7);
      begun = { x, time: end >= 0 ? this.store.window[1 - end] : this.time(x), end: end >= 0, inside: ends.length === 2 && x > ends[0] + 7 && x < ends[1] - 7, before: this.store.window };
      try { canvas.setPointerCapture(event.pointerId); } catch { /* a pointer that is gone again */ }
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!begun) return;
      const [x] = this.sheet.at(event);
      if (Math.abs(x - begun.x) < 4 && !begun.moved) return;
      begun.moved = true;
      if (begun.inside && !begun.end) {
        const shift = this.time(x) - this.time(begun.x);
        this.store.look(begun.before[0] + shift, begun.before[1] + shift);
      } else {
        const times = [begun.time, this.time(x)].sort((one, other) => one - other);
        this.store.look(...times);
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      if (begun && !begun.moved) this.store.set({ cursor: this.time(this.sheet.at(event)[0]) });
      begun = null;
    });
    canvas.addEventListener("dblclick", () => this.store.set({ window: null }));
  }

  toggle() {
    const { store } = this;
    const [from, to] = store.looked;
    if (!store.playing && (store.cursor == null || store.cursor >= to || store.cursor < from)) store.set({ cursor: from });
    store.set({ playing: !store.playing });
  }

  play() {
    const { store } = this;
    this.button.textContent = store.playing ? "❚❚" : "▶";
    this.button.setAttribute("aria-label", store.playing ? "Pause" : "Play");
    let before = performance.now();
    const frame = (now) => {
      if (!store.playing) return;
      const [from, to] = store.looked;
      const cursor = store.cursor + ((now - before) / LASTS) * (to - from) * this.speed;
      before = now;
      if (cursor >= to) store.set({ cursor: to, playing: false });
      else { store.set({ cursor }); requestAnimationFrame(frame); }
    };
    requestAnimationFrame(frame);
  }

  paint() {
    const { sheet, store } = this;
    if (!sheet.width) return;
    const context = sheet.context;
    sheet.clear();
    const floor = sheet.height - 10;
    if (this.bars) {
      const most = this.bars.all.reduce((high, value) => Math.max(high, value), 1);
      this.bars.all.forEach((value, bin) => {
        const x = Math.round(this.x(this.bars.begin + bin * this.bars.width));
        const wide = Math.max(1, Math.round(this.x(this.bars.begin + (bin + 1) * this.bars.width)) - x);
        const tall = (value / most) * (floor - 4);
        context.fillStyle = ink("bar-missing");
        context.fillRect(x, floor - tall, wide, tall);
        const good = (this.bars.good[bin] / most) * (floor - 4);
        context.fillStyle = ink("bar");
        context.fillRect(x, floor - good, wide, good);
      });
    }
    if (this.marks) {
      const labels = [...new Set(this.marks.phases.map(([name]) => name))];
      for (const [name, begin, end] of this.marks.phases) {
        context.fillStyle = PHASE_COLOURS[labels.indexOf(name) % PHASE_COLOURS.length];
        context.fillRect(this.x(begin), floor + 2, Math.max(1, this.x(end) - this.x(begin) - 0.5), 6);
      }
    }
    if (store.window) {
      const [left, right] = store.window.map((time) => this.x(time));
      context.fillStyle = ink("veil");
      context.fillRect(0, 0, Math.max(0, left), sheet.height);
      context.fillRect(right, 0, Math.max(0, sheet.width - right), sheet.height);
      context.fillStyle = ink("accent");
      for (const x of [left, right]) context.fillRect(x - 1.5, 0, 3, sheet.height);
    }
    if (store.cursor != null) {
      context.fillStyle = ink("cursor");
      context.fillRect(this.x(store.cursor) - 0.75, 0, 1.5, sheet.height);
    }
    const [from, to] = store.looked;
    this.words.textContent = `${store.cursor == null ? "" : `t = ${number(store.cursor, 5)} · `}${number(from, 5)} – ${number(to, 5)}`;
    sheet.label(`Time from ${number(store.span[0])} to ${number(store.span[1])}; looking at ${number(from, 5)} to ${number(to, 5)}`
      + `${store.cursor == null ? "" : `, cursor at ${number(store.cursor, 5)}`}. Arrow keys move the cursor.`);
  }
}

/** Messages and delivered ones by time. */
function histogram(table, from, to) {
  if (table.facts.kind === "cells") {
    const { begin, width, lanes, bins } = table.facts;
    const [all, good] = [new Float64Array(bins), new Float64Array(bins)];
    for (const name of STATUSES) {
      table[`cells_${name}`]?.forEach((value, cell) => {
        all[cell % bins] += value;
        if (name === "delivered") good[cell % bins] += value;
      });
    }
    return { begin, width, all, good, lanes };
  }
  const bins = 160;
  const width = (to - from || 1) / bins;
  const [all, good] = [new Float64Array(bins), new Float64Array(bins)];
  table.sent_at.forEach((time, row) => {
    const bin = Math.min(bins - 1, Math.floor((time - from) / width));
    all[bin] += 1;
    if (table.status[row] === 0) good[bin] += 1;
  });
  return { begin: from, width, all, good };
}
