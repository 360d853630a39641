// A lane for every node, a bar for every step, an arrow for every message; where they are too many, how many.
import { Sheet, calmed, framed } from "./canvas.js";
import { PHASE_COLOURS, STATUSES, STATUS_COLOURS, STATUS_WORDS, css, ink, isDark, sequential } from "./colours.js";
import { count, make, number, tickText, ticks } from "./words.js";

const LEFT = 64;
const RULER = 24;
const PHASES = 15;
const TOP = RULER + PHASES + 6;

export class SpaceTimePanel {
  constructor(root, store, source, run) {
    Object.assign(this, { root, store, source, run });
    this.legend = root.appendChild(make("div", { class: "legend-slot" }));
    this.sheet = new Sheet(root.appendChild(make("div", { class: "sheet" })), "Space and time");
    this.lanes = [0, run.nodes];
    this.hidden = new Set(run.nodes > 12 ? ["link_down"] : []);
    this.draw = framed(() => this.paint());
    this.fetch = calmed(() => this.load(), 60);
    this.sheet.resized = () => { this.fetch(); this.draw(); };
    this.sheet.listen({
      pan: (dx, dy) => this.pan(dx, dy),
      zoom: (factor, x, y, event) => this.zoom(factor, x, y, event),
      click: (x, y) => this.pick(x, y),
      hover: (x, y) => this.hover(x, y),
      twice: (x) => store.zoom(0.4, this.time(x)),
    });
    this.stop = store.on(["window", "runs"], () => { this.draw(); this.fetch(); });
    this.stopDrawing = store.on(["selection", "cursor", "theme"], () => this.draw());
    this.load();
  }

  close() {
    this.stop();
    this.stopDrawing();
    this.sheet.watch.disconnect();
  }

  async load() {
    const { store, source } = this;
    const run = this.run = store.runs[this.run.number];
    const [from, to] = store.looked;
    const asked = { from, to: store.window ? to : to * 1.000001 + 1e-9, ...this.nodes,
      bins: Math.max(16, Math.min(1024, Math.round((this.sheet.width - LEFT) / 2) || 400)) };
    try {
      [this.table, this.marks] = await Promise.all([source.get(run, "window", asked), source.get(run, "marks")]);
      this.explain();
      this.draw();
    } catch (error) {
      this.sheet.say(error.message, 80, 60);
    }
  }

  explain() {
    const { facts } = this.table;
    const seen = facts.kind === "messages"
      ? STATUSES.filter((_, code) => this.table.status.includes(code))
      : STATUSES.filter((name) => this.table[`cells_${name}`]);
    const parts = facts.kind === "messages"
      ? seen.map((name) => make("button", { class: "key", type: "button", "aria-pressed": !this.hidden.has(name),
          click: () => this.toggle(name) }, swatch(STATUS_COLOURS[name]), STATUS_WORDS[name]))
      : [make("span", { class: "legend-name" }, "share delivered"), make("span", { class: "legend-end" }, "0%"), ramp(),
          make("span", { class: "legend-end" }, "100%")];
    const words = facts.kind === "messages" ? `${count(facts.messages)} messages`
      : `${facts.messages === null ? "too many messages" : `${count(facts.messages)} messages`} to draw one by one: zoom in`;
    const phases = [...new Set(this.marks.phases.map(([name]) => name))];
    const named = phases.length > 1 ? phases.slice(0, 8).map((name, place) => make("span", { class: "coloured" }, swatch(PHASE_COLOURS[place % PHASE_COLOURS.length]), name)) : [];
    if (this.marks.absences.length) named.push(make("span", { class: "coloured" }, swatch("var(--away)"), "away"));
    this.legend.replaceChildren(make("div", { class: "legend" }, ...parts, ...named, make("span", { class: "legend-extra" }, words)));
    this.sheet.label(`Space and time of ${this.run.nodes} nodes from ${number(this.store.looked[0])} to `
      + `${number(this.store.looked[1])}: ${words}. Phases: ${[...new Set(this.marks.phases.map(([name]) => name))].join(", ")}.`);
  }

  toggle(name) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    this.explain();
    this.draw();
  }

  // --- places -------------------------------------------------------------------------------------

  x(time) {
    const [from, to] = this.store.looked;
    return LEFT + ((time - from) / (to - from)) * (this.sheet.width - LEFT - 10);
  }

  time(x) {
    const [from, to] = this.store.looked;
    return from + ((x - LEFT) / (this.sheet.width - LEFT - 10)) * (to - from);
  }

  /** The middle of a lane; the server's is on top. */
  y(node) {
    return TOP + (this.row(node) + 0.5 - this.lanes[0]) * this.height;
  }

  row(node) {
    if (this.run.server == null) return node;
    return node === this.run.server ? 0 : node + 1;
  }

  nodeOf(row) {
    if (this.run.server == null) return row;
    return row === 0 ? this.run.server : row - 1;
  }

  /** The nodes of the lanes: the server, whose lane is the first, is at the other end of every message. */
  get nodes() {
    const [low, high] = this.lanes;
    if (this.run.server == null || high - low === this.run.nodes) return { low, high };
    return { low: Math.max(0, low - 1), high: Math.max(1, high - 1) };
  }

  get height() {
    return (this.sheet.height - TOP - 8) / (this.lanes[1] - this.lanes[0]);
  }

  pan(dx, dy) {
    const [from, to] = this.store.looked;
    const moved = (dx / (this.sheet.width - LEFT - 10)) * (to - from);
    if (this.store.window) this.store.look(from - moved, to - moved);
    const width = this.lanes[1] - this.lanes[0];
    if (width < this.run.nodes && Math.abs(dy) > 0) {
      this.slack = (this.slack ?? 0) - dy / this.height;
      const rows = Math.trunc(this.slack);
      this.slack -= rows;
      const low = Math.max(0, Math.min(this.run.nodes - width, this.lanes[0] + rows));
      if (low !== this.lanes[0]) { this.lanes = [low, low + width]; this.fetch(); this.draw(); }
    }
  }

  zoom(factor, x, y, event) {
    if (event?.shiftKey || x < LEFT) this.zoomLanes(factor, y);
    else this.store.zoom(factor, this.time(x));
  }

  /** Fewer or more lanes around a place. */
  zoomLanes(factor, y) {
    const [low, high] = this.lanes;
    const around = low + Math.max(0, y - TOP) / this.height;
    const width = Math.max(Math.min(4, this.run.nodes), Math.min(this.run.nodes, Math.round((high - low) * factor + (factor > 1 ? 0.6 : -0.6))));
    const begin = Math.max(0, Math.min(this.run.nodes - width, Math.round(around - ((around - low) / (high - low)) * width)));
    this.lanes = [begin, begin + width];
    this.fetch();
    this.draw();
  }

  // --- drawing ------------------------------------------------------------------------------------

  paint() {
    const { sheet, table } = this;
    if (!sheet.width) return;
    const context = sheet.context;
    sheet.clear();
    this.paintLanes(context);
    this.paintAbsences(context);
    this.paintPhases(context);
    context.save();
    context.beginPath();
    context.rect(LEFT, TOP - 4, sheet.width - LEFT, sheet.height - TOP + 4);
    context.clip();
    if (table?.facts.kind === "cells") this.paintCells(context);
    if (table?.step_client) this.paintSteps(context);
    if (table?.facts.kind === "messages") this.paintMessages(context);
    context.restore();
    this.paintRuler(context);
    this.paintCursor(context);
  }

  paintLanes(context) {
    const { sheet, run, store } = this;
    const selected = store.selection?.run === run.number ? store.selection : null;
    const every = Math.max(1, Math.ceil(13 / this.height));
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let row = this.lanes[0]; row < this.lanes[1]; row += 1) {
      const node = this.nodeOf(row);
      const y = this.y(node);
      const chosen = selected && (selected.node === node || selected.sender === node || selected.receiver === node);
      if (this.height >= 5 || chosen) {
        context.fillStyle = chosen ? ink("chosen") : row % 2 ? ink("stripe") : "transparent";
        context.fillRect(LEFT, y - this.height / 2, sheet.width - LEFT, Math.max(1, this.height));
      }
      if (row % every === 0 || chosen || (node === run.server && every > 1)) {
        const name = node === run.server ? "server" : store.name(run, node);
        context.fillStyle = chosen ? ink("accent") : ink("soft");
        context.fillText(name.length > 9 ? `${name.slice(0, 8)}…` : name, LEFT - 8, y);
      }
    }
  }

  /** Who is away is in the shade. */
  paintAbsences(context) {
    context.fillStyle = ink("away");
    for (const [client, begin, end] of this.marks?.absences ?? []) {
      const [left, right] = [Math.max(LEFT, this.x(begin)), Math.min(this.sheet.width, this.x(end))];
      if (right > left && this.y(client) >= TOP) context.fillRect(left, this.y(client) - this.height / 2, right - left, Math.max(1, this.height));
    }
  }

  paintPhases(context) {
    if (!this.marks) return;
    const { sheet } = this;
    const labels = [...new Set(this.marks.phases.map(([name]) => name))];
    context.save();
    context.beginPath();
    context.rect(LEFT, RULER, sheet.width - LEFT, sheet.height);
    context.clip();
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.font = "10px system-ui, sans-serif";
    for (const [name, begin, end] of this.marks.phases) {
      const [left, right] = [this.x(begin), this.x(end)];
      if (right < LEFT || left > sheet.width) continue;
      const colour = PHASE_COLOURS[labels.indexOf(name) % PHASE_COLOURS.length];
      context.fillStyle = colour;
      context.fillRect(left, RULER, Math.max(1, right - left - 0.5), PHASES - 2);
      const room = Math.min(right, sheet.width) - Math.max(left, LEFT);
      if (room > 7 * name.length + 8) {
        context.fillStyle = "#1b1f24";
        context.fillText(name, Math.max(left, LEFT) + 5, RULER + PHASES / 2 - 0.5);
      }
    }
    const moves = this.marks.moves.filter((time) => this.x(time) >= LEFT && this.x(time) <= sheet.width);
    if (moves.length && moves.length < sheet.width / 3) {
      context.strokeStyle = ink("moves");
      context.lineWidth = 1;
      context.beginPath();
      for (const time of moves) {
        const x = Math.round(this.x(time)) + 0.5;
        context.moveTo(x, RULER + PHASES);
        context.lineTo(x, sheet.height);
      }
      context.stroke();
    }
    context.restore();
  }

  paintRuler(context) {
    const { sheet, store } = this;
    const [from, to] = store.looked;
    const places = ticks(from, to, Math.max(3, sheet.width / 110));
    const step = places.length > 1 ? places[1] - places[0] : 1;
    context.fillStyle = ink("soft");
    context.strokeStyle = ink("line");
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = "11px system-ui, sans-serif";
    for (const place of places) {
      const x = this.x(place);
      if (x < LEFT - 1) continue;
      context.fillText(tickText(place, step), Math.min(x, sheet.width - 18), 11);
      context.beginPath();
      context.moveTo(x, 19);
      context.lineTo(x, RULER);
      context.stroke();
    }
    context.textAlign = "right";
    context.fillText("time", LEFT - 8, 11);
  }

  paintCursor(context) {
    const { cursor } = this.store;
    if (cursor == null) return;
    const x = this.x(cursor);
    if (x < LEFT) return;
    context.strokeStyle = ink("cursor");
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, RULER - 4);
    context.lineTo(x, this.sheet.height);
    context.stroke();
  }

  /** How many were sent, by how opaque, and which share of them was delivered, by colour. */
  paintCells(context) {
    const { table } = this;
    const { begin, width, lanes, bins, nodes } = table.facts;
    const all = new Float64Array(lanes * bins);
    for (const name of STATUSES) table[`cells_${name}`]?.forEach((value, cell) => { all[cell] += value; });
    const good = table.cells_delivered ?? new Int32Array(lanes * bins);
    const most = all.reduce((high, value) => Math.max(high, value), 1);
    const perLane = (nodes[1] - nodes[0]) / lanes;
    const wide = Math.max(1, this.x(begin + width) - this.x(begin));
    for (let lane = 0; lane < lanes; lane += 1) {
      const node = Math.floor(nodes[0] + lane * perLane);
      const top = this.y(node) - this.height / 2;
      const tall = Math.max(1, this.height * perLane - (this.height > 8 ? 3 : 0));
      for (let bin = 0; bin < bins; bin += 1) {
        const sent = all[lane * bins + bin];
        if (!sent) continue;
        const x = this.x(begin + bin * width);
        if (x + wide < LEFT || x > this.sheet.width) continue;
        context.fillStyle = css(sequential(good[lane * bins + bin] / sent), 0.35 + 0.65 * Math.sqrt(sent / most));
        context.fillRect(x, top, wide + 0.4, tall);
      }
    }
  }

  paintSteps(context) {
    const { table } = this;
    const labels = [...new Set(this.marks.phases.map(([name]) => name))];
    const over = table.facts.kind === "cells";
    context.globalAlpha = isDark() ? 0.55 : 0.9;
    const tall = over ? 2 : Math.min(12, Math.max(1.5, this.height * 0.46));
    for (let row = 0; row < table.step_client.length; row += 1) {
      const y = this.y(table.step_client[row]) + (over ? this.height / 2 - 3 : 0);
      const [left, right] = [this.x(table.step_started_at[row]), this.x(table.step_ended_at[row])];
      const phase = table.facts.step_phases[table.step_phase[row]];
      context.fillStyle = PHASE_COLOURS[Math.max(0, labels.indexOf(phase)) % PHASE_COLOURS.length];
      if (right - left < 0.8) {
        context.beginPath();
        context.arc(left, y, Math.min(4, tall / 2 + 1), 0, 2 * Math.PI);
        context.fill();
      } else {
        context.fillRect(left + 0.5, y - tall / 2, Math.max(1, right - left - 1), tall);
      }
    }
    context.globalAlpha = 1;
  }

  /** From where and when to where and when; one that takes no time bows to the right. */
  arrow(row) {
    const { table } = this;
    const [y, toY] = [this.y(table.sender[row]), this.y(table.receiver[row])];
    const x = this.x(table.sent_at[row]);
    const arrived = table.arrived_at[row];
    const toX = Number.isNaN(arrived) ? x : this.x(arrived);
    const bow = arrived === table.sent_at[row] ? Math.min(this.room, 4 + Math.abs(toY - y) * 0.4) : 0;
    return [x, y, toX, toY, bow];
  }

  /** How far a message that takes no time may bow: most of the way to the next step. */
  measureRoom() {
    const { step_started_at: started, step_ended_at: ended } = this.table;
    const lasting = started ? Array.from(started, (time, row) => ended[row] - time).filter((time) => time > 0).sort((one, other) => one - other) : [];
    const [from, to] = this.store.looked;
    const usual = lasting.length ? (lasting[lasting.length >> 1] / (to - from)) * this.sheet.width : 16;
    this.room = Math.max(4, Math.min(usual * 0.7, this.sheet.width / 4));
  }

  paintMessages(context) {
    const { table, store, run } = this;
    this.measureRoom();
    const selected = store.selection?.run === run.number ? store.selection : null;
    const many = table.sender.length;
    const base = many > 1500 ? 0.35 : many > 400 ? 0.5 : 0.75;
    const order = [2, 0, 5, 3, 4, 1];
    for (const code of order) {
      const status = STATUSES[code];
      if (this.hidden.has(status)) continue;
      context.strokeStyle = context.fillStyle = STATUS_COLOURS[status];
      for (let row = 0; row < many; row += 1) {
        if (table.status[row] !== code) continue;
        const touched = !selected || (selected.kind === "node"
          ? table.sender[row] === selected.node || table.receiver[row] === selected.node
          : table.sender[row] === selected.sender && table.receiver[row] === selected.receiver);
        context.globalAlpha = selected ? (touched ? 1 : 0.07) : status === "delivered" || status === "link_down" ? base : 1;
        context.lineWidth = selected && touched ? 1.8 : 1;
        this.one(context, status, this.arrow(row), many <= 1200);
      }
    }
    context.globalAlpha = 1;
  }

  one(context, status, [x, y, toX, toY, bow], head) {
    const down = toY > y ? 1 : -1;
    if (status === "link_down") {
      context.beginPath();
      context.moveTo(x, y);
      context.lineTo(x + 3, y + down * Math.min(7, this.height * 0.45));
      context.stroke();
      return;
    }
    const gone = status === "lost" || status === "carried";
    const endY = gone ? y + (toY - y) * 0.45 : toY;
    const endX = gone ? Math.max(x, x + (toX - x) * 0.45) + (bow ? bow * 0.5 : 0) : toX;
    context.beginPath();
    context.moveTo(x, y);
    if (bow && !gone) context.quadraticCurveTo(Math.max(x, toX) + bow, (y + toY) / 2, toX, toY);
    else context.lineTo(endX, endY);
    context.stroke();
    if (gone || status === "late") {
      context.beginPath();
      for (const side of [-1, 1]) {
        context.moveTo(endX - 3, endY - 3 * side);
        context.lineTo(endX + 3, endY + 3 * side);
      }
      context.stroke();
    } else if (head) {
      const angle = bow ? Math.atan2((toY - y) / 2, -bow) : Math.atan2(toY - y, toX - x);
      context.beginPath();
      context.moveTo(toX, toY);
      context.lineTo(toX - 6 * Math.cos(angle - 0.35), toY - 6 * Math.sin(angle - 0.35));
      context.lineTo(toX - 6 * Math.cos(angle + 0.35), toY - 6 * Math.sin(angle + 0.35));
      context.fill();
    }
  }

  // --- what is under the pointer ------------------------------------------------------------------

  /** The message nearest to a place, as its row. */
  message(x, y) {
    const { table } = this;
    if (table?.facts.kind !== "messages") return null;
    let best = 6;
    let found = null;
    for (let row = 0; row < table.sender.length; row += 1) {
      if (this.hidden.has(STATUSES[table.status[row]])) continue;
      const [ax, ay, bx, by, bow] = this.arrow(row);
      if (y < Math.min(ay, by) - 5 || y > Math.max(ay, by) + 5 || Math.abs(by - ay) < 1) continue;
      const along = Math.max(0, Math.min(1, (y - ay) / (by - ay)));
      const away = Math.abs(ax + (bx - ax) * along + bow * 2 * along * (1 - along) - x);
      if (away < best) { best = away; found = row; }
    }
    return found;
  }

  laneAt(y) {
    const row = Math.floor(this.lanes[0] + (y - TOP) / this.height);
    return row >= this.lanes[0] && row < this.lanes[1] ? this.nodeOf(row) : null;
  }

  pick(x, y) {
    const { store, run, table } = this;
    if (y < TOP - 4) { store.set({ cursor: this.time(Math.max(x, LEFT)) }); return; }
    const row = x < LEFT ? null : this.message(x, y);
    if (row !== null) {
      store.set({ selection: { kind: "edge", run: run.number, sender: table.sender[row], receiver: table.receiver[row] },
        cursor: table.sent_at[row] });
      return;
    }
    const node = this.laneAt(y);
    if (x >= LEFT) store.set({ cursor: this.time(x), selection: null });
    else if (node !== null) store.set({ selection: { kind: "node", run: run.number, node } });
  }

  hover(x, y) {
    if (x === null) return;
    const { store, run, table, sheet } = this;
    const row = x < LEFT ? null : this.message(x, y);
    sheet.canvas.style.cursor = row !== null || x < LEFT ? "pointer" : "crosshair";
    if (row !== null) {
      const arrived = table.arrived_at[row];
      sheet.say(`${store.name(run, table.sender[row])} → ${store.name(run, table.receiver[row])}: ${STATUS_WORDS[STATUSES[table.status[row]]]}\n`
        + `${table.facts.phases[table.phase[row]]}, ${table.facts.kinds[table.kind[row]]}, step ${table.step[row]}\n`
        + `sent ${number(table.sent_at[row], 6)}${Number.isNaN(arrived) ? "" : `, arrived ${number(arrived, 6)}`}`
        + (table.staleness[row] >= 0 ? `\nstaleness ${table.staleness[row]}` : ""), x, y);
      return;
    }
    const node = this.laneAt(y);
    sheet.say(x >= LEFT && node !== null ? `${node === run.server ? "server" : `node ${store.name(run, node)}`}, time ${number(this.time(x), 6)}${this.stepAt(node, x)}` : "", x, y);
  }

  stepAt(node, x) {
    const { table } = this;
    const time = this.time(x);
    if (!table?.step_client) return "";
    for (let row = 0; row < table.step_client.length; row += 1) {
      if (table.step_client[row] === node && table.step_started_at[row] <= time && time < table.step_ended_at[row]) {
        return `\nstep ${table.step_step[row]} of ${table.facts.step_phases[table.step_phase[row]]}, took in ${table.step_absorbed[row]}`;
      }
    }
    return "";
  }
}

function swatch(colour) {
  const mark = make("span", { class: "swatch", "aria-hidden": "true" });
  mark.style.background = colour;
  return mark;
}

function ramp() {
  const bar = make("span", { class: "ramp", "aria-hidden": "true" });
  bar.style.background = `linear-gradient(to right, ${Array.from({ length: 9 }, (_, place) => css(sequential(place / 8))).join(", ")})`;
  return bar;
}
