// Shows the list of runs, or one run, from the node's server-sent events.

import { LossChart } from "./charts.js";
import { ago, clock, count, duration, element, percent, shortName, size } from "./format.js";

const byId = (id) => document.getElementById(id);
const show = (id, isShown) => { byId(id).hidden = !isShown; };

const STATES = {
  training: "good", ready: "warn", averaging: "averaging", finished: "good", joining: "warn", leaving: "bad", gone: "bad",
};
const SECTIONS = ["run", "peers", "losses", "rounds", "contributions"];
const LOG_ROWS = 12;

let source = null; // the event stream of the present page
let logRows = LOG_ROWS;
let selected = null; // index of the entry that the timeline shows; null: the newest
let skew = 0; // seconds that the node's clock is ahead of ours
let known = {}; // the newest data of each section

const chart = new LossChart(byId("loss-chart"), byId("loss-value"));
const now = () => Date.now() / 1000 + skew;

// Navigation -----------------------------------------------------------------------------------------------------
function route() {
  const run = location.hash.startsWith("#/runs/") ? decodeURIComponent(location.hash.slice(7)) : null;
  source?.close();
  [known, selected, logRows] = [{}, null, LOG_ROWS];
  for (const part of ["list", "run", "notice"]) show(part, false);
  document.title = "diloco-peer";
  if (run) listen(`runs/${encodeURIComponent(run)}/events`, SECTIONS, showRun);
  else listen("events", ["runs"], showList);
}

function listen(url, sections, take) {
  source = new EventSource(url);
  const ours = source;
  for (const section of sections) {
    source.addEventListener(section, (event) => {
      if (ours !== source) return;
      connection("live", "live");
      show("notice", false);
      known[section] = JSON.parse(event.data);
      take(section);
    });
  }
  source.addEventListener("error", () => {
    if (ours !== source) return;
    const isOver = ours.readyState === EventSource.CLOSED;
    connection("lost", isOver ? "not connected" : "connection lost, trying again");
    if (isOver && !known.run) notice("This node does not know this run.");
  });
}

function connection(state, text) {
  byId("connection").className = `connection ${state}`;
  byId("connection").textContent = text;
}

function notice(text) {
  byId("notice").textContent = text;
  show("notice", true);
}

// The list of runs -----------------------------------------------------------------------------------------------
function showList() {
  const runs = known.runs;
  if (runs.length === 1 && !location.hash.startsWith("#/all")) {
    history.replaceState(null, "", `#/runs/${encodeURIComponent(runs[0].run)}`);
    return route();
  }
  show("list", true);
  show("list-empty", !runs.length);
  const focused = document.activeElement?.getAttribute("href");
  byId("list-rows").replaceChildren(...runs.map((run) => {
    const bar = element("div");
    bar.style.width = size(run.outer_step / run.outer_steps);
const status = run.looked_at === null ? "not looked at yet" : run.peers
      ? `${plural(run.peers, "peer")}, ${count(run.tokens_per_second)} tokens/s, ${count(run.lineage_tokens)} tokens in all`
      : "no peer is live";
    return element("li", {}, element("a", { href: `#/runs/${encodeURIComponent(run.run)}` },
      element("strong", { textContent: run.name }),
      element("p", { className: "id", textContent: run.run }),
      element("div", { className: "progress" }, bar),
      element("p", { textContent: `Outer step ${count(run.outer_step)} of ${count(run.outer_steps)}: ${status}` })));
  }));
  if (focused) [...document.querySelectorAll(".runs a")].find((link) => link.getAttribute("href") === focused)?.focus();
}

// One run --------------------------------------------------------------------------------------------------------
function showRun(section) {
  show("run", true);
  const draw = {
    run: [showHead, showRounds, showBoard], peers: [showPeers], losses: [showLosses, showHead],
    rounds: [showRounds], contributions: [showBoard],
  };
  if (known.run) for (const one of draw[section]) one();
}

const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function showHead() {
  const run = known.run;
  if (run.looked_at !== null) skew = Math.abs(run.looked_at - Date.now() / 1000) > 10 ? run.looked_at - Date.now() / 1000 : 0;
  document.title = `${run.outer_step ?? "–"}/${run.outer_steps} ${run.name}`;
  byId("run-name").textContent = run.name;
  byId("run-id").textContent = run.run;
  byId("run-about").textContent = run.about.join(" · ");
  byId("run-join").textContent = run.join && `To train in it: ${run.join}`;
  const [word, kind] = run.is_finished ? ["finished", "good"]
    : run.looked_at === null ? ["looking", "warn"]
    : run.peers ? ["training", "good"] : ["no live peer", "warn"];
  byId("run-state").className = `pill ${kind}`;
  byId("run-state").textContent = word;
  byId("progress").setAttribute("aria-valuemax", run.outer_steps);
  byId("progress").setAttribute("aria-valuenow", run.outer_step ?? "");
  byId("progress-bar").style.width = size(run.outer_step / run.outer_steps);
  const heldOut = known.losses?.held_out.at(-1);
  const left = run.outer_steps - run.outer_step;
  byId("figures").replaceChildren(
    figure("Outer step", count(run.outer_step), `of ${count(run.outer_steps)}`),
    figure("Peers", count(run.peers), run.archives ? `and ${plural(run.archives, "archive")}` : ""),
    figure("Speed", count(run.tokens_per_second), "tokens/s"),
    figure("Trained so far", count(run.lineage_tokens), "tokens"),
    figure("Held-out loss", heldOut ? heldOut[1].toFixed(3) : "–", heldOut ? `step ${count(heldOut[0])}` : "not known yet"),
    left > 0 && run.seconds_per_step
      ? figure("Left", duration(left * run.seconds_per_step), `${duration(run.seconds_per_step)} a step`)
      : figure("Left", left > 0 ? "–" : "nothing", left > 0 ? "no step seen yet" : ""),
  );
  byId("alerts").replaceChildren(...alerts(run));
}

function figure(name, value, more) {
  return element("div", {}, element("dt", { textContent: name }),
    element("dd", {}, `${value} `, element("small", { textContent: more })));
}

function alerts(run) {
  const found = [];
  const say = (kind, textContent) => found.push(element("li", { className: kind, textContent }));
  if (run.disagreements.length) {
    say("bad", `The peers disagree at outer step ${run.disagreements.join(", ")}: their log or state digests differ.`);
  }
  for (const line of run.amended) say("", `${capital(line)}.`);
  const { signed } = run;
  if (signed) say("good", `Archives have signed outer step ${signed.outer_step} (${signed.log_digest.slice(0, 8)}).`);
  return found;
}

function showLosses() {
  const { training, held_out: heldOut } = known.losses;
  show("loss-empty", !training.length && !heldOut.length);
  show("loss-chart", training.length || heldOut.length);
  chart.show(known.losses);
}

// Peers ----------------------------------------------------------------------------------------------------------
function showPeers() {
  const { rows, more } = known.peers;
  show("peers-empty", !rows.length);
  show("peers", rows.length);
  byId("peers-rows").replaceChildren(...rows.map(peerRow));
  byId("peers-more").textContent = `And ${plural(more, "more peer")}.`;
  show("peers-more", more);
}

function peerRow(peer) {
  const { inner_steps: innerSteps } = known.run;
  const isArchive = peer.state === "archiving";
  const name = element("td", {}, nameOf(peer.peer), peer.name ? ` ${peer.name}` : null, peer.peer === known.run.me ? badge() : null,
    peer.trouble ? element("span", { className: "trouble", textContent: `Its work does not count: ${peer.trouble}` }) : null);
  const state = element("td", {},
    element("span", { className: `pill ${STATES[peer.state] ?? ""}`, textContent: peer.state }),
    peer.disagrees ? " " : null,
    peer.disagrees ? element("span", { className: "pill bad", textContent: "other digest", title: peer.digest }) : null);
  const inner = peer.state === "training" ? `+${Math.round((100 * peer.inner_step) / innerSteps)} %` : "";
  const reach = { open: "open", NAT: "behind a NAT", "-": "not known" }[peer.reach] ?? peer.reach;
  const links = [peer.relayed && `${peer.relayed} relayed`, peer.unreached && `${peer.unreached} not reached`];
  const tokens = peer.tokens === null ? "–" : count(peer.tokens);
  return element("tr", { className: peer.state === "gone" ? "gone" : "" }, name, state,
    cell("Step", "number", count(peer.outer_step), inner),
    cell("Tokens/s", "number", isArchive || peer.state === "gone" ? "–" : count(peer.tokens_per_second)),
    cell("Loss", "number", peer.loss === null ? "–" : peer.loss.toFixed(3)),
    cell("Contribution", "number", tokens, peer.tokens === null ? "" : percent(peer.share)),
    cell("Reach", "", reach, links.filter(Boolean).join(", ")),
    element("td", { className: "number seen", data: { label: "Last seen", seen: peer.seen }, textContent: ago(now() - peer.seen) }));
}

function cell(label, className, text, more = "") {
  return element("td", { className, data: { label } }, text, more ? element("small", { textContent: ` ${more}` }) : null);
}

const nameOf = (peer) => element("span", { className: "mono", textContent: shortName(peer), title: peer });
const badge = () => element("span", { className: "me", textContent: "this machine" });

// Rounds and the log ---------------------------------------------------------------------------------------------
function showRounds() {
  if (!known.rounds) return;
  const rows = known.rounds.rows;
  show("rounds", rows.length);
  show("rounds-empty", !rows.length);
  showTimeline(rows);
  showLog(rows.filter((row) => row.digest));
}

const kindOf = (row) =>
  row.certified === false || row.absent?.some((one) => one.kind === "partly" || one.kind === "lied") ? "bad"
    : row.absent_count ? "some" : "";

function showTimeline(rows) {
  const shown = rows.slice(-Math.max(12, Math.floor((byId("timeline").clientWidth || 600) / 13)));
  const longest = Math.max(...shown.map((row) => row.seconds ?? 0));
  byId("longest").textContent = longest ? `longest ${duration(longest)}` : "";
  if (!shown.some((row) => row.index === selected)) selected = null;
  const chosen = shown.find((row) => row.index === selected) ?? shown.at(-1);
  const hadFocus = byId("timeline").contains(document.activeElement);
  byId("timeline").replaceChildren(...shown.map((row) => {
    const bar = element("div", { className: "bar" });
    bar.style.height = size(row.seconds ? Math.max(0.08, (0.92 * row.seconds) / longest) : 0.26);
    if (row.seconds && row.round_seconds) {
      const part = element("div", { className: "part" });
      part.style.height = size(row.round_seconds / row.seconds);
      bar.append(part);
    }
    const button = element("button", {
      type: "button", tabIndex: row === chosen ? 0 : -1, "aria-pressed": String(row === chosen), "aria-label": summary(row),
      title: summary(row), className: `${kindOf(row)} ${row.seconds ? "" : "unseen"} ${row.change ? "amended" : ""}`, data: { index: row.index },
    }, bar);
    button.addEventListener("click", () => select(row.index));
    return element("li", {}, button);
  }));
  if (chosen) byId("round-detail").replaceChildren(...detail(chosen));
  if (hadFocus) focusSelected();
}

function select(index) {
  selected = index;
  showTimeline(known.rounds.rows);
  focusSelected();
}

const focusSelected = () => byId("timeline").querySelector('[aria-pressed="true"]')?.focus();

byId("timeline").addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
  const buttons = [...byId("timeline").querySelectorAll("button")];
  const place = buttons.indexOf(document.activeElement);
  if (!move || place < 0) return;
  event.preventDefault();
  select(Number(buttons[Math.max(0, Math.min(buttons.length - 1, place + move))].dataset.index));
});

function summary(row) {
const parts = [`Outer step ${row.index + 1}`];
  parts.push(row.seconds ? duration(row.seconds) : "time not seen");
  if (row.members) parts.push(plural(row.members, "peer"));
  if (row.absent_count) parts.push(`${row.absent_count} did not count`);
  if (row.change) parts.push(`amendment ${row.change.number}`);
  return parts.join(", ");
}

function detail(row) {
  const facts = [];
  if (row.at) facts.push(`made at ${clock(row.at)}`);
  facts.push(row.seconds ? `${duration(row.seconds)} after the step before` : "this node did not see its duration");
  if (row.round_seconds) facts.push(`about ${duration(row.round_seconds)} of it in the round`);
  if (row.members) facts.push(`${plural(row.members, "peer")}, ${count(row.tokens)} tokens`);
  else if (row.working_peers) facts.push(`${plural(row.working_peers, "peer")} there`);
  const lines = (row.absent ?? []).map((one) => element("li", {}, nameOf(one.peer), ` ${one.why}`));
  if (row.absent_count > lines.length) lines.push(element("li", { textContent: `and ${row.absent_count - lines.length} more` }));
  if (row.change) lines.push(element("li", {}, changeOf(row)));
  if (row.joined_count) lines.push(element("li", {}, "new: ", ...row.joined.flatMap((peer) => [nameOf(peer), " "])));
  if (row.digest && !row.absent_count) lines.push(element("li", { className: "quiet", textContent: "The work of all peers counts." }));
  return [element("h3", { textContent: `Outer step ${row.index + 1}` }),
    element("p", { textContent: `${capital(facts.join("; "))}.` }), element("ul", {}, ...lines)];
}

// Words for the organiser's amendment in an entry.
const changeOf = ({ index, change }) =>
  `Amendment ${change.number} of the organiser, from outer step ${index + 2} on: ${change.values}.`;

const capital = (text) => text[0].toUpperCase() + text.slice(1);

function showLog(entries) {
  byId("log-empty").textContent = known.run.no_log;
  show("log-empty", !entries.length);
  show("log", entries.length);
  const newest = [...entries].reverse();
  byId("log-rows").replaceChildren(...newest.slice(0, logRows).map((row) => element("tr", {},
    element("td", { className: "number", textContent: count(row.index) }),
    digest(row.digest), digest(row.state, "wide"),
    element("td", { className: "number", textContent: count(row.members) }),
    element("td", { className: "number", textContent: count(row.tokens) }),
    element("td", {}, signatures(row), row.change ? " " : null, row.change ? amendmentPill(row) : null))));
  show("log-more", newest.length > logRows);
}

byId("log-more").addEventListener("click", () => {
  logRows += 4 * LOG_ROWS;
  showRounds();
});

const digest = (hex, more = "") =>
  element("td", { className: `mono ${more}`, textContent: hex ? hex.slice(0, 8) : "–", title: hex ?? "not known here" });

const amendmentPill = (row) =>
  element("span", { className: "pill amended", textContent: `amendment ${row.change.number}`, title: changeOf(row) });

function signatures(row) {
  if (row.signed === null) return element("span", { className: "quiet", textContent: "not known here" });
  const kind = row.certified ? "good" : "warn";
  const title = row.certified ? "A quorum of the voters has signed." : "A minority made this entry alone, without a quorum.";
  return element("span", { className: `pill ${kind}`, textContent: `${row.signed} of ${row.voters}`, title });
}

// Contributions --------------------------------------------------------------------------------------------------
function showBoard() {
  if (!known.contributions) return;
  const { rows, more, teams, tokens, first } = known.contributions;
  byId("board-empty").textContent = known.run.no_log;
  show("board-empty", !rows.length);
  show("board", rows.length);
  byId("board").replaceChildren(...rows.map((row, place) => {
    const bar = element("div");
    bar.style.width = size(row.tokens / Math.max(1, rows[0].tokens));
    return element("li", {}, element("span", { className: "rank", textContent: `${place + 1}.` }),
      element("span", {}, nameOf(row.peer), row.team ? element("span", { className: "team", textContent: row.team }) : null,
        row.peer === known.run.me ? badge() : null),
      element("span", { textContent: `${count(row.tokens)} tokens, ${percent(row.tokens / Math.max(1, tokens))}` }),
      element("div", { className: "share", title: `in ${plural(row.entries, "entry").replace("entrys", "entries")}` }, bar));
  }));
  show("teams-part", teams.length);
  byId("teams").replaceChildren(...teams.map((row, place) => element("li", {},
    element("span", { className: "rank", textContent: `${place + 1}.` }),
    element("span", { textContent: `${row.team} (${plural(row.peers, "peer")})` }),
    element("span", { textContent: `${count(row.tokens)} tokens, ${percent(row.tokens / Math.max(1, tokens))}` }))));
  const notes = [];
  if (first) notes.push(`Counted from entry ${count(first)} on: this node does not have the entries before it.`);
  if (more) notes.push(`And ${plural(more, "more peer")}.`);
  byId("board-note").textContent = notes.join(" ");
  show("board-note", notes.length);
}

setInterval(() => {
  for (const seen of document.querySelectorAll(".seen")) seen.textContent = ago(now() - Number(seen.dataset.seen));
}, 1000);
addEventListener("hashchange", route);
let resized = 0;
addEventListener("resize", () => {
  clearTimeout(resized);
  resized = setTimeout(() => known.rounds && showRounds(), 150);
});
route();
