// The graph: links coloured and thickened by what they did, both directions apart; messages move with the cursor.
import { STATUSES, STATUS_COLOURS, css, ink, sequential } from "./colours.js";
import { Panel, belongs, takesPart } from "./panel.js";
import { QUANTITIES, edgePlace, legend, scaleOf } from "./quantities.js";
import { count, make } from "./words.js";

const MOST_LINES = 60000;

export const LAYOUTS = { own: "as declared", server: "server in the middle", circle: "circle", spring: "by links" };

export class NetworkPanel extends Panel {
  constructor(root, store, source, run) {
    super(root, store, source, run, { loads: ["window", "quantity", "layout"], draws: ["selection", "cursor"] });
    this.camera = { x: 0, y: 0, zoom: 1 };
    this.places = null;
    this.sheet.listen({
      pan: (dx, dy) => { this.camera.x += dx; this.camera.y += dy; this.draw(); },
      zoom: (factor, x, y) => this.zoom(1 / factor, x, y),
      click: (x, y) => this.pick(x, y),
      hover: (x, y) => this.hover(x, y),
      twice: () => { this.camera = { x: 0, y: 0, zoom: 1 }; this.draw(); },
    });
    this.load();
  }

  changed(values) {
    if (values.has("cursor")) this.followCursor();
  }

  async load() {
    const { store, source } = this;
    const run = this.run = store.runs[this.run.number];
    try {
      const answers = await this.newest([source.get(run, "graph"), source.get(run, "edges", store.asked)]);
      if (!answers) return;
      const [graph, edges] = answers;
      Object.assign(this, { graph, edges });
      this.values = edges[store.quantity] ?? new Float64Array(edges.sender.length).fill(NaN);
      this.order = this.ordered();
      this.scale = scaleOf(store.quantity, [this.values]);
      this.weight = this.widths();
      await this.lay();
      this.said();
      this.draw();
    } catch (error) {
      this.sheet.say(error.message, 10, 10);
    }
  }

  /** Thickness by bytes (by attempts where nothing has any), of what the window shows. */
  widths() {
    const of = this.edges.bytes.some((value) => value > 0) ? this.edges.bytes : this.edges.attempts;
    const most = of.reduce((high, value) => Math.max(high, value), 1);
    return Float32Array.from(of, (value) => Math.sqrt(value / most));
  }

  get layout() {
    const { store, run, graph } = this;
    const possible = { own: Boolean(graph.x), server: run.server != null, circle: true, spring: true };
    if (store.layout && possible[store.layout]) return store.layout;
    const dense = this.edges.facts.edges > 0.3 * run.nodes * (run.nodes - 1);
    return possible.own ? "own" : possible.server ? "server" : dense || run.nodes <= 12 ? "circle" : "spring";
  }

  async lay() {
    const { run, graph } = this;
    const layout = this.layout;
    const key = `${layout} ${layout === "spring" ? run.status : ""}`;
    if (this.laid === key) return;
    let where = { x: new Float64Array(run.nodes), y: new Float64Array(run.nodes) };
    const around = layout === "server" ? run.nodes - 1 : run.nodes;
    let place = 0;
    for (let node = 0; node < run.nodes; node += 1) {
      if (layout === "server" && node === run.server) continue;
      const angle = (2 * Math.PI * place) / around;
      where.x[node] = Math.sin(angle);
      where.y[node] = -Math.cos(angle);
      place += 1;
    }
    if (layout === "own") where = { x: graph.x, y: graph.y.map((value) => -value) };
    if (layout === "spring") {
      this.sheet.label("The network is being laid out");
      where = await this.source.get(run, "layout");
    }
    this.places = fitted(where, layout === "circle" || layout === "server");
    this.laid = key;
  }

  said() {
    const { store, run, edges, scale } = this;
    const known = edges[store.quantity];
    this.legend.replaceChildren(known && edges.sender.length
      ? legend(store.quantity, scale, { extra: `width: bytes sent${this.order.length < edges.facts.edges ? `; ${count(this.order.length)} of ${count(edges.facts.edges)} links` : ""}` }) : make("div", { class: "legend" }, edges.sender.length ? `there is no ${QUANTITIES[store.quantity].words} here` : "nothing was sent"));
    this.sheet.label(`Network of ${run.nodes} nodes and ${edges.facts.edges} directed links, `
      + `coloured by ${QUANTITIES[store.quantity].words}. The matrix view holds the same numbers.`);
  }

  zoom(factor, x, y) {
    const camera = this.camera;
    const zoom = Math.min(Math.max(camera.zoom * factor, 0.4), 60);
    const real = zoom / camera.zoom;
    const [middleX, middleY] = [this.sheet.width / 2, this.sheet.height / 2];
    camera.x = x - middleX - (x - middleX - camera.x) * real;
    camera.y = y - middleY - (y - middleY - camera.y) * real;
    camera.zoom = zoom;
    this.draw();
  }

  node(number) {
    const { width, height } = this.sheet;
    const size = Math.min(width, height) / 2 - 34;
    const wide = this.layout === "own" || this.layout === "spring" ? Math.min(Math.max(width - 70, 0) / 2, size * 1.7) : size;
    return [width / 2 + this.camera.x + this.places.x[number] * wide * this.camera.zoom,
      height / 2 + this.camera.y + this.places.y[number] * size * this.camera.zoom];
  }

  /** A link bends to the right of its direction, so that there and back are two lines. */
  bend(place) {
    const [ax, ay] = this.node(this.edges.sender[place]);
    const [bx, by] = this.node(this.edges.receiver[place]);
    const bow = this.bow;
    return [ax, ay, (ax + bx) / 2 - (by - ay) * bow, (ay + by) / 2 + (bx - ax) * bow, bx, by];
  }

  paint() {
    if (!this.places || !this.edges || !this.sheet.width) return;
    const { sheet, edges, selected } = this;
    const context = sheet.context;
    sheet.clear();
    const many = edges.sender.length;
    this.bow = many > 4000 ? 0.04 : 0.12;
    const { values } = this;
    const crowded = Math.min(1, Math.sqrt(150 / Math.max(1, many)));
    context.lineCap = "round";
    for (const place of this.order) {
      const touched = !selected || belongs(selected, edges.sender[place], edges.receiver[place]);
      const alpha = selected ? (touched ? 0.95 : 0.08) : 0.08 + 0.9 * crowded;
      const value = values[place];
      context.strokeStyle = Number.isNaN(value) ? css([140, 140, 140], alpha * 0.5) : css(sequential(this.scale.of(value)), alpha);
      context.lineWidth = (0.5 + 2.6 * this.weight[place] * crowded) * (selected && touched ? 1.5 : 1);
      this.line(context, this.bend(place), touched && (selected || many <= 1500));
    }
    this.paintMoment(context);
    this.paintNodes(context);
  }

  /** The worst links last, on top of the others; of very many, evenly chosen ones. */
  ordered() {
    const key = (place) => (Number.isNaN(this.values[place]) ? Infinity : this.values[place]);
    const order = Array.from(this.values.keys()).sort((one, other) => key(other) - key(one) || one - other);
    const every = Math.ceil(order.length / MOST_LINES);
    return every > 1 ? order.filter((_, place) => place % every === 0) : order;
  }

  line(context, [ax, ay, cx, cy, bx, by], head) {
    context.beginPath();
    context.moveTo(ax, ay);
    context.quadraticCurveTo(cx, cy, bx, by);
    context.stroke();
    if (!head) return;
    const angle = Math.atan2(by - cy, bx - cx);
    const [x, y] = [bx - Math.cos(angle) * (this.radius + 1), by - Math.sin(angle) * (this.radius + 1)];
    const size = 3 + context.lineWidth;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x - size * Math.cos(angle - 0.45), y - size * Math.sin(angle - 0.45));
    context.lineTo(x - size * Math.cos(angle + 0.45), y - size * Math.sin(angle + 0.45));
    context.closePath();
    context.fillStyle = context.strokeStyle;
    context.fill();
  }

  get radius() {
    const size = Math.min(this.sheet.width, this.sheet.height);
    const around = this.layout === "circle" || this.layout === "server";
    const room = around ? (1.3 * size) / this.run.nodes : size / (9 * Math.sqrt(this.run.nodes));
    return Math.max(1.2, Math.min(13, room, size / 28)) * Math.min(1.6, Math.sqrt(this.camera.zoom));
  }

  paintNodes(context) {
    const { run, store, sheet } = this;
    const radius = this.radius;
    const labelled = radius >= 6.5;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let node = 0; node < run.nodes; node += 1) {
      const [x, y] = this.node(node);
      if (x < -20 || y < -20 || x > sheet.width + 20 || y > sheet.height + 20) continue;
      const server = node === run.server;
      const chosen = takesPart(this.selected, node);
      context.beginPath();
      if (server) context.roundRect(x - Math.max(22, radius * 1.4), y - Math.max(10, radius * 0.9), 2 * Math.max(22, radius * 1.4), 2 * Math.max(10, radius * 0.9), 5);
      else context.arc(x, y, radius, 0, 2 * Math.PI);
      context.fillStyle = chosen ? ink("accent") : server ? ink("strong") : ink("node");
      context.fill();
      if (radius >= 3 || chosen) {
        context.lineWidth = chosen ? 2.5 : 1.2;
        context.strokeStyle = chosen ? ink("text") : ink("paper");
        context.stroke();
      }
      const name = store.name(run, node);
      if (server) {
        context.font = "600 11px system-ui, sans-serif";
        context.fillStyle = ink("paper");
        context.fillText("server", x, y + 0.5);
      } else if (labelled && name.length <= 3) {
        context.font = `600 ${Math.min(12, radius * 0.95)}px system-ui, sans-serif`;
        context.fillStyle = "#fff";
        context.fillText(name, x, y + 0.5);
      } else if (labelled || chosen) {
        context.font = "11px system-ui, sans-serif";
        context.fillStyle = ink("text");
        context.fillText(name.length > 18 ? `${name.slice(0, 17)}…` : name, x, y + radius + 9);
      }
    }
  }

  // --- messages at the cursor ---------------------------------------------------------------------

  async followCursor() {
    const { store, source, run } = this;
    const at = store.cursor;
    if (at == null) { this.moment = null; return; }
    const width = this.moment?.width ?? (store.span[1] - store.span[0]) / 400;
    if (this.moment?.table && at >= this.moment.from && at < this.moment.to) return;
    if (this.waiting) return;
    this.waiting = true;
    try {
      const window = { from: at - width * 0.5, to: at + width * 2 };
      const table = await source.get(run, "window", { ...window, low: 0, high: run.nodes, bins: 16 });
      const few = table.facts.kind === "messages";
      this.moment = { ...window, table: few ? table : null, width: few ? width : width / 3 };
    } catch {
      this.moment = { from: at, to: at, table: null, width };
    } finally {
      this.waiting = false;
    }
    this.draw();
  }

  /** Messages under way at the cursor, or where they take no time, those just sent. */
  paintMoment(context) {
    const at = this.store.cursor;
    const table = this.moment?.table;
    if (at == null || !table || !table.sender) return;
    const flash = Math.max(this.moment.width, 1e-12);
    for (let row = 0; row < table.sender.length; row += 1) {
      const status = STATUSES[table.status[row]];
      const sent = table.sent_at[row];
      const arrives = Number.isNaN(table.arrived_at[row]) ? sent : table.arrived_at[row];
      const lasts = Math.max(arrives - sent, flash * 0.6);
      const share = (at - sent) / lasts;
      if (share < 0 || share > 1 || status === "link_down") continue;
      const place = edgePlace(this.edges, table.sender[row], table.receiver[row]);
      if (place === undefined) continue;
      const [ax, ay, cx, cy, bx, by] = this.bend(place);
      const along = status === "lost" || status === "carried" ? Math.min(share, 0.55) : share;
      const rest = 1 - along;
      const x = rest * rest * ax + 2 * rest * along * cx + along * along * bx;
      const y = rest * rest * ay + 2 * rest * along * cy + along * along * by;
      context.beginPath();
      context.arc(x, y, Math.max(2.5, Math.min(4.5, this.radius * 0.45)), 0, 2 * Math.PI);
      context.fillStyle = STATUS_COLOURS[status];
      context.fill();
      context.lineWidth = 1;
      context.strokeStyle = ink("paper");
      context.stroke();
    }
  }

  // --- what is under the pointer ------------------------------------------------------------------

  found(x, y) {
    if (!this.places || !this.edges) return null;
    let best = Math.max(this.radius + 3, 7);
    let node = null;
    for (let number = 0; number < this.run.nodes; number += 1) {
      const [nx, ny] = this.node(number);
      const away = Math.hypot(nx - x, ny - y);
      if (away < best) { best = away; node = number; }
    }
    if (node !== null) return { kind: "node", run: this.run.number, node };
    let edge = null;
    best = 7;
    for (let place = 0; place < this.edges.sender.length; place += 1) {
      const [ax, ay, cx, cy, bx, by] = this.bend(place);
      if (x < Math.min(ax, bx, cx) - 8 || x > Math.max(ax, bx, cx) + 8) continue;
      if (y < Math.min(ay, by, cy) - 8 || y > Math.max(ay, by, cy) + 8) continue;
      let [px, py] = [ax, ay];
      for (let part = 1; part <= 12; part += 1) {
        const along = part / 12;
        const rest = 1 - along;
        const qx = rest * rest * ax + 2 * rest * along * cx + along * along * bx;
        const qy = rest * rest * ay + 2 * rest * along * cy + along * along * by;
        const away = toSegment(x, y, px, py, qx, qy);
        if (away < best) { best = away; edge = place; }
        [px, py] = [qx, qy];
      }
    }
    return edge === null ? null : { kind: "edge", run: this.run.number, sender: this.edges.sender[edge], receiver: this.edges.receiver[edge] };
  }

  pick(x, y) {
    this.store.set({ selection: this.found(x, y) });
  }

  hover(x, y) {
    if (x === null) return;
    if (this.edges && this.edges.sender.length > 40000) return;
    const found = this.found(x, y);
    this.sheet.canvas.style.cursor = found ? "pointer" : "grab";
    if (!found) { this.sheet.say(""); return; }
    const { store, run, edges } = this;
    if (found.kind === "node") { this.sheet.say(`node ${store.name(run, found.node)}`, x, y); return; }
    const place = edgePlace(edges, found.sender, found.receiver);
    const quantity = QUANTITIES[store.quantity];
    this.sheet.say(`${store.name(run, found.sender)} → ${store.name(run, found.receiver)}\n`
      + `${quantity.words}: ${quantity.text((edges[store.quantity] ?? [])[place])}`, x, y);
  }
}

/** Within [-1, 1] in both directions; of a circle, as it is. */
function fitted({ x, y }, round) {
  if (round) return { x, y };
  const range = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  const centred = (values) => {
    const [low, high] = range(values);
    const half = (high - low) / 2 || 1;
    return Float64Array.from(values, (value) => (value - (low + high) / 2) / half);
  };
  return { x: centred(x), y: centred(y) };
}

function toSegment(x, y, ax, ay, bx, by) {
  const length = (bx - ax) ** 2 + (by - ay) ** 2;
  const share = length ? Math.max(0, Math.min(1, ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length)) : 0;
  return Math.hypot(x - ax - share * (bx - ax), y - ay - share * (by - ay));
}
