// Space and time: what is asked for a window, what the legend says, and what pointers do; lanes.js draws it.
import { PHASE_COLOURS, STATUSES, STATUS_COLOURS, STATUS_WORDS } from "./colours.js";
import { LEFT, Lanes, TOP } from "./lanes.js";
import { ramp, swatch } from "./panel.js";
import { count, make, number } from "./words.js";

export class SpaceTimePanel extends Lanes {
  constructor(root, store, source, run) {
    super(root, store, source, run, { loads: ["window"], draws: ["selection", "cursor", "window"] });
    this.lanes = [0, run.nodes];
    this.hidden = new Set(run.nodes > 12 ? ["link_down"] : []);
    this.sheet.resized = () => { this.reload(); this.draw(); };
    this.sheet.listen({
      pan: (dx, dy) => this.pan(dx, dy),
      zoom: (factor, x, y, event) => this.zoom(factor, x, y, event),
      click: (x, y) => this.pick(x, y),
      hover: (x, y) => this.hover(x, y),
      twice: (x) => store.zoom(0.4, this.time(x)),
    });
    this.load();
  }

  async load() {
    const { store, source } = this;
    const run = this.run = store.runs[this.run.number];
    const [from, to] = store.looked;
    const asked = { from, to: store.window ? to : to * 1.000001 + 1e-9, ...this.nodes,
      bins: Math.max(16, Math.min(1024, Math.round((this.sheet.width - LEFT) / 2) || 400)) };
    try {
      const answers = await this.newest([source.get(run, "window", asked), source.get(run, "marks")]);
      if (!answers) return;
      [this.table, this.marks] = answers;
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
    const phases = this.phaseNames;
    const named = phases.length > 1 ? phases.slice(0, 8).map((name, place) => make("span", { class: "coloured" }, swatch(PHASE_COLOURS[place % PHASE_COLOURS.length]), name)) : [];
    if (this.marks.absences.length) named.push(make("span", { class: "coloured" }, swatch("var(--away)"), "away"));
    this.legend.replaceChildren(make("div", { class: "legend" }, ...parts, ...named, make("span", { class: "legend-extra" }, words)));
    this.sheet.label(`Space and time of ${this.run.nodes} nodes from ${number(this.store.looked[0])} to `
      + `${number(this.store.looked[1])}: ${words}. Phases: ${phases.join(", ")}.`);
  }

  toggle(name) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    this.explain();
    this.draw();
  }

  // --- moving -------------------------------------------------------------------------------------

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
      if (low !== this.lanes[0]) { this.lanes = [low, low + width]; this.reload(); this.draw(); }
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
    this.reload();
    this.draw();
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
