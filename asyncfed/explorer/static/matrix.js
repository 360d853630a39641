// Sender × receiver of any quantity, sorted as one likes; of two runs, also their difference.
import { css, diverging, ink, sequential } from "./colours.js";
import { Panel, takesPart } from "./panel.js";
import { QUANTITIES, differenceScale, edgePlace, legend, scaleOf } from "./quantities.js";
import { make, number } from "./words.js";

export const SORTS = { number: "number", sent: "most sent", received: "most received", rate: "lowest delivery", value: "largest value" };

export class MatrixPanel extends Panel {
  /** `other` makes it a difference: `run` − `other`. */
  constructor(root, store, source, run, other = null) {
    super(root, store, source, run, { loads: ["window", "quantity"], draws: ["selection", "sort"] });
    this.other = other;
    this.range = [0, 0, run.nodes];
    this.sheet.listen({
      pan: (dx, dy) => this.pan(dx, dy),
      zoom: (factor, x, y) => this.zoom(factor, x, y),
      click: (x, y) => {
        const cell = this.cell(x, y);
        this.store.set({ selection: cell && { kind: "edge", run: this.run.number, sender: cell[0], receiver: cell[1] } });
      },
      hover: (x, y) => this.hover(x, y),
      twice: () => { this.range = [0, 0, this.run.nodes]; this.draw(); },
    });
    this.load();
  }

  changed() {
    this.sorted = null;
  }

  async load() {
    const { store, source } = this;
    this.run = store.runs[this.run.number];
    try {
      const asked = [source.get(this.run, "edges", store.asked)];
      if (this.other) asked.push(source.get(store.runs[this.other.number], "edges", store.asked));
      const answers = await this.newest(asked);
      if (!answers) return;
      const [edges, others] = answers;
      this.edges = edges;
      this.values = edges[store.quantity] ?? new Float64Array(edges.sender.length).fill(NaN);
      if (others) this.values = difference(edges, others, store.quantity);
      this.scale = this.other ? differenceScale([this.values]) : scaleOf(store.quantity, [this.values]);
      this.sorted = null;
      this.legend.replaceChildren(legend(store.quantity, this.scale, { difference: Boolean(this.other) }));
      this.sheet.label(`Matrix of ${QUANTITIES[store.quantity].words}, ${this.run.nodes} senders by ${this.run.nodes} receivers, `
        + `from ${QUANTITIES[store.quantity].text(this.scale.low)} to ${QUANTITIES[store.quantity].text(this.scale.high)}`);
      this.draw();
    } catch (error) {
      this.sheet.say(error.message, 60, 60);
    }
  }

  /** The nodes in the order in which they stand. */
  get order() {
    if (this.sorted) return this.sorted;
    const { edges, run, store } = this;
    const key = new Float64Array(run.nodes);
    const weight = new Float64Array(run.nodes);
    for (let place = 0; place < edges.sender.length; place += 1) {
      const [sender, receiver] = [edges.sender[place], edges.receiver[place]];
      if (store.sort === "sent") key[sender] -= edges.sent[place];
      if (store.sort === "received") key[receiver] -= edges.delivered[place];
      if (store.sort === "rate") { key[sender] += edges.delivered[place]; weight[sender] += edges.attempts[place]; }
      if (store.sort === "value" && !Number.isNaN(this.values[place])) { key[sender] -= this.values[place]; weight[sender] += 1; }
    }
    if (store.sort === "rate" || store.sort === "value") key.forEach((value, node) => { key[node] = weight[node] ? value / weight[node] : Infinity; });
    this.sorted = Array.from(key.keys());
    if (store.sort !== "number") this.sorted.sort((one, other) => key[one] - key[other] || one - other);
    this.places = new Int32Array(run.nodes);
    this.sorted.forEach((node, place) => { this.places[node] = place; });
    return this.sorted;
  }

  get side() {
    return Math.max(40, Math.min(this.sheet.width - 58, this.sheet.height - 46));
  }

  get corner() {
    return [50 + Math.max(0, (this.sheet.width - 58 - this.side) / 2), 38];
  }

  paint() {
    const { sheet, edges, selected } = this;
    if (!edges || !sheet.width) return;
    const context = sheet.context;
    sheet.clear();
    const [left, top] = this.corner;
    const [column, row, width] = this.range;
    const size = this.side / width;
    const order = this.order;
    context.fillStyle = ink("stripe");
    context.fillRect(left, top, this.side, this.side);
    context.save();
    context.beginPath();
    context.rect(left, top, this.side, this.side);
    context.clip();
    const gap = size > 7 ? 1 : 0;
    for (let place = 0; place < edges.sender.length; place += 1) {
      const x = this.places[edges.receiver[place]] - column;
      const y = this.places[edges.sender[place]] - row;
      if (x < -1 || y < -1 || x > width || y > width) continue;
      const value = this.values[place];
      if (Number.isNaN(value)) continue;
      const share = this.scale.of(value);
      context.fillStyle = css(this.other ? diverging(share) : sequential(share));
      context.fillRect(left + x * size, top + y * size, Math.max(0.8, size - gap), Math.max(0.8, size - gap));
    }
    if (selected?.kind === "edge") {
      context.strokeStyle = ink("cursor");
      context.lineWidth = 2;
      context.strokeRect(left + (this.places[selected.receiver] - column) * size, top + (this.places[selected.sender] - row) * size, Math.max(size, 3), Math.max(size, 3));
    }
    context.restore();
    this.paintNames(context, order, left, top, size);
  }

  paintNames(context, order, left, top, size) {
    const { store, run } = this;
    const [column, row, width] = this.range;
    const every = Math.max(1, Math.ceil(15 / size));
    const shorten = (name) => (name.length > 6 ? `${name.slice(0, 5)}…` : name);
    const longest = order.reduce((most, node) => Math.max(most, node === run.server ? 1 : shorten(store.name(run, node)).length), 1);
    const across = every * Math.max(1, Math.ceil((longest * 6.5 + 6) / (size * every)));
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let place = 0; place < run.nodes; place += every) {
      const node = order[place];
      const name = node === run.server ? "S" : store.name(run, node);
      const short = shorten(name);
      const chosen = takesPart(this.selected, node);
      context.fillStyle = chosen ? ink("accent") : ink("soft");
      if (place >= row && place < row + width) {
        context.textAlign = "right";
        context.fillText(short, left - 5, top + (place - row + 0.5) * size);
      }
      if (place >= column && place < column + width && place % across === 0) {
        context.textAlign = "center";
        context.fillText(short, left + (place - column + 0.5) * size, top - 9);
      }
    }
    context.fillStyle = ink("soft");
    context.textAlign = "center";
    context.fillText("receiver →", left + this.side / 2, 10);
    context.save();
    context.translate(left - 40, top + this.side / 2);
    context.rotate(-Math.PI / 2);
    context.fillText("← sender", 0, 0);
    context.restore();
  }

  cell(x, y) {
    if (!this.edges) return null;
    const [left, top] = this.corner;
    const [column, row, width] = this.range;
    const size = this.side / width;
    const [across, down] = [Math.floor((x - left) / size + column), Math.floor((y - top) / size + row)];
    if (x < left || y < top || x > left + this.side || y > top + this.side) return null;
    const [receiver, sender] = [this.order[across], this.order[down]];
    return receiver === undefined || sender === undefined ? null : [sender, receiver];
  }

  pan(dx, dy) {
    const [column, row, width] = this.range;
    const size = this.side / width;
    const most = this.run.nodes - width;
    this.range = [Math.max(0, Math.min(most, column - dx / size)), Math.max(0, Math.min(most, row - dy / size)), width];
    this.draw();
  }

  zoom(factor, x, y) {
    const [left, top] = this.corner;
    const [column, row, width] = this.range;
    const wide = Math.max(Math.min(4, this.run.nodes), Math.min(this.run.nodes, width * factor));
    const [across, down] = [Math.max(0, Math.min(1, (x - left) / this.side)), Math.max(0, Math.min(1, (y - top) / this.side))];
    const most = this.run.nodes - wide;
    this.range = [Math.max(0, Math.min(most, column + across * (width - wide))), Math.max(0, Math.min(most, row + down * (width - wide))), wide];
    this.draw();
  }

  hover(x, y) {
    const cell = x === null ? null : this.cell(x, y);
    if (!cell) { this.sheet.say(""); return; }
    const { store, run, edges } = this;
    const place = edgePlace(edges, ...cell);
    const quantity = QUANTITIES[store.quantity];
    const words = place === undefined ? "no message was due" : `${this.other ? "difference of " : ""}${quantity.words}: ${quantity.text(this.values[place])}`;
    this.sheet.say(`${store.name(run, cell[0])} → ${store.name(run, cell[1])}\n${words}`
      + (place === undefined ? "" : `\n${number(edges.delivered[place])} of ${number(edges.attempts[place])} delivered`), x, y);
  }
}

/** A quantity of edges minus that of the same edges of another run; NaN where one has none. */
export function difference(edges, others, quantity) {
  const [mine, theirs] = [edges[quantity], others[quantity]];
  return Float64Array.from(edges.sender, (sender, place) => {
    const other = edgePlace(others, sender, edges.receiver[place]);
    return mine && theirs && other !== undefined ? mine[place] - theirs[other] : NaN;
  });
}
