// A lane for every node, a bar for every step, an arrow for every message; where they are too many, how many.
import { PHASE_COLOURS, STATUSES, STATUS_COLOURS, css, ink, isDark, sequential } from "./colours.js";
import { Panel, belongs, takesPart } from "./panel.js";
import { tickText, ticks } from "./words.js";

export const LEFT = 64;
const RULER = 24;
const PHASES = 15;
export const TOP = RULER + PHASES + 6;

/** Draws `table` (of a window) and `marks` (of the run) in the rows `lanes`, but for what is `hidden`. */
export class Lanes extends Panel {
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

  get phaseNames() {
    return [...new Set(this.marks.phases.map(([name]) => name))];
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
    const every = Math.max(1, Math.ceil(13 / this.height));
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let row = this.lanes[0]; row < this.lanes[1]; row += 1) {
      const node = this.nodeOf(row);
      const y = this.y(node);
      const chosen = takesPart(this.selected, node);
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
    const labels = this.phaseNames;
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
    for (let lane = 0; lane < lanes; lane += 1) {
      const node = Math.floor(nodes[0] + lane * perLane);
      const top = this.y(node) - this.height / 2;
      const tall = Math.max(1, this.height * perLane - (this.height > 8 ? 3 : 0));
      for (let bin = 0; bin < bins; bin += 1) {
        const sent = all[lane * bins + bin];
        if (!sent) continue;
        const x = Math.round(this.x(begin + bin * width));
        const wide = Math.max(1, Math.round(this.x(begin + (bin + 1) * width)) - x);
        if (x + wide < LEFT || x > this.sheet.width) continue;
        context.fillStyle = css(sequential(good[lane * bins + bin] / sent), 0.35 + 0.65 * Math.sqrt(sent / most));
        context.fillRect(x, top, wide, tall);
      }
    }
  }

  paintSteps(context) {
    const { table } = this;
    const labels = this.phaseNames;
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
    const { table, selected } = this;
    this.measureRoom();
    const many = table.sender.length;
    const base = many > 1500 ? 0.35 : many > 400 ? 0.5 : 0.75;
    const order = [2, 0, 5, 3, 4, 1];
    for (const code of order) {
      const status = STATUSES[code];
      if (this.hidden.has(status)) continue;
      context.strokeStyle = context.fillStyle = STATUS_COLOURS[status];
      for (let row = 0; row < many; row += 1) {
        if (table.status[row] !== code) continue;
        const touched = !selected || belongs(selected, table.sender[row], table.receiver[row]);
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
}
