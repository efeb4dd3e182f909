// Who sends to whom, and how fast: a table whose cells have more colour the faster, read one by one with arrow keys.

import { bitrate, element, shortName } from "./format.js";

const NAMES = 88, WIDEST = 50; // pixels of the column with names, and of a cell
const ROOMY = 38; // of a cell in which a number can be read
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

export class Matrix {
  constructor(table, output) {
    this.table = table;
    this.output = output;
    this.data = { peers: [], rates: [] };
    this.chosen = [0, 1]; // who sends, and who receives: places among the peers
    table.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.fit()).observe(table);
  }

  show(data) {
    this.data = data;
    const { peers, rates } = data;
    this.rates = new Map(rates.map(([from, to, rate]) => [`${from} ${to}`, rate]));
    const all = rates.map(([, , rate]) => Math.log(Math.max(1, rate)));
    const low = Math.min(...all), span = Math.max(...all) - low || 1;
    this.shade = (rate) => Math.round(15 + (85 * (Math.log(Math.max(1, rate)) - low)) / span);
    const last = peers.length - 1;
    this.chosen = this.chosen.map((place) => Math.max(0, Math.min(last, place)));
    const hadFocus = this.table.contains(document.activeElement);
    this.table.replaceChildren(
      element("thead", {}, element("tr", {}, element("td", { className: "corner", textContent: "from ↓ to →" }),
        ...peers.map((peer) => element("th", { scope: "col", title: peer },
          element("span", { className: "mono", textContent: shortName(peer) }))))),
      element("tbody", {}, ...peers.map((peer, from) => element("tr", {},
        element("th", { scope: "row", className: "mono", textContent: shortName(peer), title: peer }),
        ...peers.map((_, to) => this.cell(from, to))))));
    this.table.style.width = `min(100%, ${NAMES + WIDEST * peers.length}px)`;
    this.fit();
    this.choose(...this.chosen, hadFocus);
  }

  cell(from, to) {
    const rate = this.rates.get(`${from} ${to}`);
    if (from === to) return element("td", { className: "self" });
    const button = element("button", { type: "button", tabIndex: -1, "aria-label": this.said(from, to) });
    if (rate !== undefined) {
      button.className = "told";
      button.style.setProperty("--shade", `${this.shade(rate)}%`);
      button.textContent = bitrate(rate, "");
    }
    button.addEventListener("click", () => this.choose(from, to, true));
    return element("td", {}, button);
  }

  said(from, to) {
    const { peers } = this.data, rate = this.rates.get(`${from} ${to}`);
    const way = `${shortName(peers[from])} to ${shortName(peers[to])}`;
    return rate === undefined ? `${way}: not told` : `${way}: ${bitrate(rate)}`;
  }

  // Say all of one pair: both ways, each as the peer says that receives.
  choose(from, to, takesFocus) {
    this.table.querySelector("[aria-pressed]")?.removeAttribute("aria-pressed");
    this.chosen = [from, to];
    const button = this.table.tBodies[0]?.rows[from]?.cells[to + 1]?.querySelector("button");
    for (const other of this.table.querySelectorAll('button[tabindex="0"]')) other.tabIndex = -1;
    if (!button) return;
    button.tabIndex = 0;
    button.setAttribute("aria-pressed", "true");
    const back = this.rates.get(`${to} ${from}`);
    this.output.textContent = `${this.said(from, to)}; back: ${back === undefined ? "not told" : bitrate(back)}`;
    if (takesFocus) button.focus();
  }

  press(event) {
    const move = MOVES[event.key];
    if (!move) return;
    event.preventDefault();
    const size = this.data.peers.length;
    let [from, to] = [this.chosen[0] + move[0], this.chosen[1] + move[1]];
    if (from === to) [from, to] = [from + move[0], to + move[1]]; // nobody sends to itself
    if (Math.min(from, to) >= 0 && Math.max(from, to) < size) this.choose(from, to, true);
  }

  fit() {
    const width = (this.table.clientWidth - NAMES) / Math.max(1, this.data.peers.length);
    this.table.classList.toggle("roomy", width >= ROOMY);
  }
}
