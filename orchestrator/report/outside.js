// What a rollout asked of the outside, and what ran beside its agent. All texts are untrusted.

const URL_CHARS = 80;

// Tiles of the first screen; of a run without any, none.
function outsideTiles(tile) {
  const { requests = 0, refused = 0, cached = 0, sent = 0, received = 0, services = 0, ended = 0 } = run.totals.outside || {};
  const of_them = [refused ? `${whole(refused)} refused` : "", cached ? `${whole(cached)} from the cache` : "", sent ? `${bytes(sent)} sent` : "", `${bytes(received)} received`];
  return [requests ? tile(whole(requests), `request${requests === 1 ? "" : "s"} to the outside`, of_them.filter(Boolean).join(", ")) : null,
    services ? tile(whole(services), `service${services === 1 ? "" : "s"} beside agents`, ended ? `${whole(ended)} ended by themselves` : "none ended by itself") : null];
}

// How long it took; null: not known.
function took(one) {
  return one.started_s === null || one.ended_s === null ? null : one.ended_s - one.started_s;
}

// What became of a request, in words.
function statusOf(one) {
  if (one.refusal) return `refused${one.status === null ? "" : `, ${one.status}`}: ${one.refusal}`;
  return one.status === null ? "–" : String(one.status);
}

function requestFacts(requests) {
  return requests.count ? [["requests", whole(requests.count)], ["refused", whole(requests.refused)]] : [];
}

function requestsPanel(requests) {
  if (!requests.count) return [];
  const rows = requests.shown.map((one) => el("tr", one.refusal ? "refused" : "",
    el("td", "", shown(one.method)),
    titled(el("td", "", el("code", "", shown(shortened(one.url)))), one.url),
    el("td", one.refusal ? "error" : "", shown(statusOf(one))),
    el("td", "number", whole(one.sent)), el("td", "number", whole(one.received)),
    el("td", "number", seconds(took(one))), el("td", "", shown(one.source))));
  const more = requests.count - requests.shown.length;
  const title = ["Requests", el("small", "", `${whole(requests.count)}, ${whole(requests.refused)} refused`)];
  return [folded(title, "panel wide outside requests", () => el("div", "",
    scrolled(listed(["method", "address", "status", "bytes sent", "bytes received", "time", "source"], rows), "requests"),
    more ? el("p", "none", `${counted(more, "more request")} in the record`) : null))];
}

function servicesPanel(services) {
  if (!services.length) return [];
  const rows = services.map((one) => el("tr", "",
    el("td", "", shown(one.name)), el("td", "", el("code", "", shown(one.image))),
    el("td", "number", one.healthy_s === null ? "never" : seconds(one.healthy_s)),
    el("td", one.ended ? "error" : "", one.ended ? shown(one.ended) : "with the rollout")));
  const logs = services.filter((one) => one.log).map((one) =>
    folded(["The last of the log of ", shown(one.name)], "prompt", () => el("pre", "", shown(one.log))));
  return [folded(["Services", el("small", "", whole(services.length))], "panel wide outside services", () => el("div", "",
    scrolled(listed(["name", "image", "healthy after", "ended"], rows), "services"), ...logs))];
}

function listed(names, rows) {
  return el("table", "", el("thead", "", el("tr", "", ...names.map((name) => columnHead(name)))), el("tbody", "", ...rows));
}

// By whole characters: half of a pair is no text.
function shortened(url) {
  const characters = [...url];
  return characters.length > URL_CHARS ? `${characters.slice(0, URL_CHARS).join("")}…` : url;
}
