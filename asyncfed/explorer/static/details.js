// What is selected, in numbers: an edge with its messages, a node with its traffic; or what was run.
import { STATUSES, STATUS_COLOURS, STATUS_WORDS } from "./colours.js";
import { classCounts } from "./clients.js";
import { coloured } from "./learning.js";
import { edgePlace } from "./quantities.js";
import { calmed } from "./canvas.js";
import { bytes, count, make, number, percent, shape, table } from "./words.js";

const STRIP = 300;

export class Details {
  constructor(root, store, source) {
    Object.assign(this, { root, store, source });
    this.later = calmed(() => this.load(), 120);
    store.on(["selection", "shown"], () => this.load());
    store.on(["window", "runs", "cursor"], () => { if (store.selection && !store.playing) this.later(); });
    this.load();
  }

  async load() {
    const { store } = this;
    const asked = this.asked = {};
    const selection = store.selection;
    let made;
    try {
      if (!selection) made = await this.about();
      else made = selection.kind === "edge" ? await this.edge(selection) : await this.node(selection);
    } catch (error) {
      made = [make("p", { class: "empty" }, error.message)];
    }
    if (asked === this.asked) this.root.replaceChildren(...made);
  }

  heading(run, words, what) {
    return make("div", { class: "heading" }, make("h2", {}, words), make("p", { class: "faint" }, coloured(run, `${run.name}${what}`)),
      make("button", { type: "button", class: "quiet close", "aria-label": "Close the selection", click: () => this.store.set({ selection: null }) }, "✕"));
  }

  async about() {
    const { store, source } = this;
    const hint = make("p", { class: "faint hint" }, "Click a link, a node, an arrow or a cell for its numbers.");
    if (!source.live) return [hint];
    const parts = await Promise.all(store.shown.map(async (place) => {
      const run = store.runs[place];
      const { pairs, notes } = await source.get(run, "about");
      const list = make("dl", {});
      for (const [name, words] of pairs) list.append(make("dt", {}, name), make("dd", {}, folded(words)));
      return make("section", {}, make("h2", {}, coloured(run, run.name)),
        ...[...notes, ...(run.error ? [run.error] : [])].map((words) => make("p", { class: "warning", role: "alert" }, words)), list);
    }));
    return [hint, ...parts];
  }

  get windowWords() {
    const { window } = this.store;
    return window ? `, sent from ${number(window[0], 5)} to ${number(window[1], 5)}` : ", whole run";
  }

  async edge({ run: place, sender, receiver }) {
    const { store, source } = this;
    const run = store.runs[place];
    const [from, to] = store.looked;
    const [edges, graph, told] = await Promise.all([source.get(run, "edges", store.asked), source.get(run, "graph"),
      source.get(run, "edge", { sender, receiver, from, to: to * 1.000001 + 1e-9, at: store.cursor ?? (from + to) / 2 }).catch(() => null)]);
    const row = edgePlace(edges, sender, receiver);
    const heading = this.heading(run, `${store.name(run, sender)} → ${store.name(run, receiver)}`, this.windowWords);
    if (row === undefined) return [heading, make("p", { class: "empty" }, "No message was due on this link in the window.")];
    const of = (name) => edges[name]?.[row];
    const declared = edgePlace(graph, sender, receiver);
    const promise = declared === undefined ? null : graph.probability[declared];
    const facts = [["attempts", count(of("attempts")), "attempts"], ["delivered", `${count(of("delivered"))} (${percent(of("delivery_rate"))})`, "delivered"]];
    for (const name of STATUSES.slice(1)) if (of(name) > 0) facts.push([STATUS_WORDS[name], count(of(name)), name]);
    facts.push(["link up", percent(of("up_rate")), "up_rate"]);
    if (promise !== null) facts.push(["declared probability", percent(promise), "declared"], ["measured − declared", this.gap(of("up_rate"), promise, of("attempts")), "gap"]);
    facts.push(["sent", bytes(of("bytes")), "bytes"], ["delay, mean", number(of("delay_mean")), "delay_mean"], ["delay, longest", number(of("delay_max")), "delay_max"]);
    if (of("staleness_max") >= 0) facts.push(["staleness, mean", number(of("staleness_mean")), "staleness_mean"], ["staleness, largest", number(of("staleness_max")), "staleness_max"]);
    const back = edgePlace(edges, receiver, sender);
    if (back !== undefined) facts.push(["delivery rate back", percent(edges.delivery_rate[back]), "back"]);
    return [heading, list(facts), ...(told ? [strip(told, from, to), this.messages(told)] : [make("p", { class: "faint" }, "Every message of it: asyncfed view.")])];
  }

  /** With its standard error, from the declared probability. */
  gap(measured, declared, attempts) {
    const error = Math.sqrt((declared * (1 - declared)) / attempts);
    const off = measured - declared;
    return `${off >= 0 ? "+" : "−"}${percent(Math.abs(off))}${error ? ` (${number(Math.abs(off) / error, 2)} standard errors)` : ""}`;
  }

  messages(told) {
    const near = this.store.cursor;
    let order = [...told.sent_at.keys()];
    if (near != null) order.sort((one, other) => Math.abs(told.sent_at[one] - near) - Math.abs(told.sent_at[other] - near));
    order = order.slice(0, 60).sort((one, other) => told.sent_at[one] - told.sent_at[other]);
    const stale = order.some((row) => told.staleness[row] >= 0);
    const rows = order.map((row) => [number(told.step[row]), STATUS_WORDS[STATUSES[told.status[row]]], number(told.sent_at[row], 6),
      Number.isNaN(told.arrived_at[row]) ? "" : number(told.arrived_at[row], 6), told.absorbed_step[row] < 0 ? "" : number(told.absorbed_step[row]),
      ...(stale ? [told.staleness[row] < 0 ? "" : number(told.staleness[row])] : [])]);
    const words = `${count(rows.length)} of ${told.facts.whole ? count(told.sent_at.length) : "more"} messages${near == null ? "" : ", nearest to the cursor"}`;
    return table(["step", "status", "sent", "arrived", "used in", ...(stale ? ["stale"] : [])], rows, { right: [0, 2, 3, 4, 5], caption: words,
      pick: (place) => this.store.set({ cursor: told.sent_at[order[place]] }) });
  }

  async node({ run: place, node }) {
    const { store, source } = this;
    const run = store.runs[place];
    const [nodes, edges, { clients }] = await Promise.all([source.get(run, "nodes", store.asked), source.get(run, "edges", store.asked), source.get(run, "metrics")]);
    const of = (name) => nodes[name][node];
    const facts = [["steps", count(of("steps")), "steps"], ["busy", number(of("busy_time")), "busy_time"], ["last step ended", number(of("finished_at")), "finished_at"],
      ["taken in per step", number(of("absorbed_per_step"), 3), "absorbed_per_step"], ["sent", `${count(of("sent"))} messages, ${bytes(of("bytes_sent"))}`, "sent"],
      ["received", `${count(of("received"))} messages, ${bytes(of("bytes_received"))}`, "received"]];
    for (const name of ["lost", "late", "link_down"]) if (of(name)) facts.push([STATUS_WORDS[name], count(of(name)), name]);
    const row = clients.client?.indexOf(node) ?? -1;
    if (row >= 0) {
      for (const name of Object.keys(clients)) {
        if (name !== "client" && name !== "steps" && clients[name][row] != null) {
          facts.push([`${name === "samples" ? "test samples" : name.replaceAll("_", " ")}`, name === "accuracy" ? percent(clients[name][row]) : number(clients[name][row]), `final_${name}`]);
        }
      }
    }
    const heading = this.heading(run, node === run.server ? store.name(run, node) : `Node ${store.name(run, node)}`, this.windowWords);
    const slot = make("div", { class: "counts" });
    if (node !== run.server) {
      source.get(run, "classes").then(({ counts, facts: { classes } }) => {
        if (classes && (node + 1) * classes <= counts.length) slot.replaceChildren(classCounts(store, run, counts, classes, [node]));
      }).catch(() => {});
    }
    return [heading, list(facts), slot, this.links(run, edges, "sender", "receiver", node, "out"), this.links(run, edges, "receiver", "sender", node, "in")];
  }

  links(run, edges, mine, other, node, way) {
    const found = [];
    for (let row = 0; row < edges.sender.length; row += 1) if (edges[mine][row] === node) found.push(row);
    found.sort((one, next) => edges.delivery_rate[one] - edges.delivery_rate[next] || edges.bytes[next] - edges.bytes[one]);
    const rows = found.slice(0, 12).map((row) => [this.store.name(run, edges[other][row]), percent(edges.delivery_rate[row]), count(edges.delivered[row]), bytes(edges.bytes[row]), number(edges.delay_mean[row], 3)]);
    if (!rows.length) return make("p", { class: "faint" }, way === "out" ? "Nothing was sent." : "Nothing was due to come in.");
    return table([way === "out" ? "to" : "from", "delivery", "delivered", "bytes", "delay"], rows, { right: [1, 2, 3, 4],
      caption: `${way === "out" ? "Out" : "In"}: ${rows.length < found.length ? `the ${rows.length} worst of ` : ""}${count(found.length)} links`,
      pick: (place) => this.store.set({ selection: { kind: "edge", run: run.number, sender: edges.sender[found[place]], receiver: edges.receiver[found[place]] } }) });
  }
}

/** What is long stands behind its beginning. */
function folded(words) {
  if (words.length <= 240) return words;
  return make("details", {}, make("summary", {}, `${words.slice(0, 150)}…`), words);
}

function list(facts) {
  const made = make("dl", { class: "facts" });
  for (const [name, words, key] of facts) made.append(make("dt", {}, name), make("dd", { "data-fact": key }, words));
  return made;
}

/** What became of the messages over time: every one as a tick, or chunk by chunk their shares. */
function strip(told, from, to) {
  const across = (time) => ((time - from) / (to - from || 1)) * STRIP;
  const drawing = shape("svg", { viewBox: `0 0 ${STRIP} 34`, class: "strip", role: "img", preserveAspectRatio: "none",
    "aria-label": `Up and down over time: ${[...told.status].filter((code) => code === 0).length} of ${told.status.length} listed messages delivered` });
  drawing.append(shape("rect", { x: 0, y: 0, width: STRIP, height: 34, class: "none" }));
  if (told.facts.whole) {
    const wide = Math.max(0.6, Math.min(6, (STRIP / Math.max(1, told.sent_at.length)) * 0.8));
    told.sent_at.forEach((time, row) => {
      const status = STATUSES[told.status[row]];
      const tall = status === "link_down" ? 8 : status === "delivered" ? 34 : 24;
      drawing.append(shape("rect", { x: across(time), y: 34 - tall, width: wide, height: tall, fill: STATUS_COLOURS[status] }));
    });
  } else {
    told.strip_from.forEach((begin, piece) => {
      const all = STATUSES.reduce((sum, name) => sum + told[`strip_${name}`][piece], 0);
      let low = 34;
      for (const name of STATUSES) {
        const tall = all ? (told[`strip_${name}`][piece] / all) * 34 : 0;
        low -= tall;
        if (tall) drawing.append(shape("rect", { x: across(begin), y: low, width: Math.max(1, across(told.strip_to[piece]) - across(begin) - 0.3), height: tall, fill: STATUS_COLOURS[name] }));
      }
    });
  }
  return make("figure", { class: "strip-slot" }, make("figcaption", {}, told.facts.whole ? "every message, by when it was sent" : "share of messages, chunk by chunk"), drawing);
}
