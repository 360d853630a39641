// What the drawings of one run have in common: a legend, a sheet, and when to load and to draw again.
import { Sheet, calmed, framed } from "./canvas.js";
import { css, sequential } from "./colours.js";
import { make } from "./words.js";

export class Panel {
  /** Loads again when any of the values `loads` of the store changes, and draws again with any of `draws`. */
  constructor(root, store, source, run, { loads, draws }) {
    Object.assign(this, { root, store, source, run });
    this.legend = root.appendChild(make("div", { class: "legend-slot" }));
    this.sheet = new Sheet(root.appendChild(make("div", { class: "sheet" })), run.name);
    this.draw = framed(() => this.paint());
    this.sheet.resized = this.draw;
    this.reload = calmed(() => this.load(), 40);
    this.stops = [store.on([...loads, "runs"], this.reload), store.on([...draws, "theme"], (changed) => { this.changed?.(changed); this.draw(); })];
  }

  close() {
    this.stops.forEach((stop) => stop());
    this.sheet.watch.disconnect();
  }

  /** What was asked for; null where something else was asked for meanwhile. */
  async newest(asked) {
    const turn = this.turn = (this.turn ?? 0) + 1;
    const answers = await Promise.all(asked);
    return turn === this.turn ? answers : null;
  }

  /** What is selected of this run, if anything. */
  get selected() {
    return this.store.selection?.run === this.run.number ? this.store.selection : null;
  }
}

/** Whether a message or link belongs to what is selected. */
export function belongs(selected, sender, receiver) {
  return selected.kind === "node" ? sender === selected.node || receiver === selected.node
    : sender === selected.sender && receiver === selected.receiver;
}

/** Whether a node does: itself, or at an end. */
export function takesPart(selected, node) {
  return selected !== null && [selected.node, selected.sender, selected.receiver].includes(node);
}

export function swatch(colour) {
  const mark = make("span", { class: "swatch", "aria-hidden": "true" });
  mark.style.background = colour;
  return mark;
}

/** The colours from least to most. */
export function ramp(colour = sequential, low = 0) {
  const bar = make("span", { class: "ramp", "aria-hidden": "true" });
  const stops = Array.from({ length: 9 }, (_, place) => css(colour(low + ((1 - low) * place) / 8)));
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  return bar;
}
