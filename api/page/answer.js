// SPDX-License-Identifier: Apache-2.0

// What the agent knows of one address: the same as `weft explain`.

import { who } from "/flows.js";
import { ago, ask, element } from "/page.js";

let asked = 0;

function list(pairs) {
  const dl = element("dl", "");
  for (const [name, value] of pairs) {
    if (value) dl.append(element("dt", "", name), element("dd", "", value));
  }
  return dl;
}

function claims(title, all) {
  if (!all?.length) return [];
  const body = element("tbody", "", ...all.map((c, i) => element("tr", c.wins && i === 0 ? "chosen" : "",
    element("td", "mono", c.prefix), element("td", "", c.identity), element("td", "", c.clusterName || `cluster ${c.cluster}`),
    element("td", "", c.source), element("td", "mono", c.key || c.file || ""), element("td", "", c.revision ?? ""), element("td", "", ago(c.since)),
    element("td", "", c.wins ? (i === 0 ? "✓ in force" : "covered") : ""))));
  const head = element("thead", "", element("tr", "", ...["Prefix", "Identity", "Cluster", "Source", "Key or file", "Revision", "Age", ""].map((h) => element("th", "", h))));
  return [element("h2", "", title), element("table", "", head, body)];
}

function kernelText(k) {
  if (k.error) return k.error;
  const entry = k.entry ? `identity ${k.entry.identity}, tunnel endpoint ${k.entry.tunnelEndpoint || "none"}` : "no entry";
  if (k.kept) return `✓ ${entry}, kept from before the agent's start`;
  return k.equal ? `✓ ${entry}` : `✗ ${entry}; it should be: ${k.wanted}`;
}

const routeText = (r) => r && [r.type, r.gateway && `via ${r.gateway}`, r.device && `dev ${r.device}`, r.protocol && `(${r.protocol})`].filter(Boolean).join(" ");

/** showAnswer explains an address; none hides the answer. */
export async function showAnswer(section, address) {
  const mine = ++asked;
  section.hidden = !address;
  if (!address) return;
  let content;
  try {
    const e = await ask("/v1/explain/" + encodeURIComponent(address));
    content = [
      element("h2", "", `${e.address} is ${who(e.identity)}`),
      list([
        ["identity", e.identity.id],
        ["why", e.why],
        ["labels", (e.identity.labels ?? []).join(", ") || (e.labelsKnown ? "none" : "not known yet")],
        ["services", (e.services ?? []).map((s) => `${s.namespace}/${s.name} ${s.port}/${s.protocol}: ${s.holder ? `not in force, as ${s.holder} has it` : `${s.used} used: ${s.why}`}`).join("; ")],
        ["node", e.node && `${e.node.name} in ${e.node.cluster}${e.node.via ? `, via ${e.node.via}` : ""}`],
        ["cluster", e.cluster && `${e.cluster.name}: ${e.cluster.state} for ${ago(e.cluster.since)}`],
        ["kernel", kernelText(e.kernel)],
        ["route", routeText(e.kernel.route) || e.kernel.routeError],
      ]),
      ...claims("Claims", e.claims), ...claims("Waiting for their node", e.waiting),
      ...(e.advice ?? []).map((text) => element("p", "failed", `next: ${text}`)),
      ...(e.refused ?? []).map((r) => element("p", "failed", `refused: ${r.cluster} ${r.kind} ${r.key}: ${r.reason}, ${ago(r.at)} ago`)),
    ];
  } catch (e) {
    content = [element("p", "failed", e.message)];
  }
  if (mine === asked) section.replaceChildren(...content); // else another question has been asked meanwhile
}
