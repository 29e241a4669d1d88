// SPDX-License-Identifier: Apache-2.0

// Services that more than this cluster has to do with: who offers backends of each, and how many are used, and why.

import { byID, element } from "/page.js";

const most = 50; // services shown

const offer = (name, ready, draining) => `${name} ${ready}${draining ? `+${draining} draining` : ""}`;

function offers(service) {
  const of = service.local ? [element("span", "", offer("own", service.local.ready, service.local.draining))] : [];
  for (const c of service.clusters ?? []) {
    of.push(element("span", c.lost ? "stale" : c.shared ? "" : "none", offer(c.cluster, c.ready, c.draining) + (c.lost ? " (lost)" : c.shared ? "" : " (not shared)")));
  }
  return of.flatMap((span, i) => (i ? [", ", span] : [span]));
}

const address = (f) => `${f.ip.includes(":") ? `[${f.ip}]` : f.ip}:${f.port}/${f.protocol}`;

function use(service) {
  if (!service.local) return [element("span", "none", "our cluster has no service of the name")];
  return (service.frontends ?? []).map((f) => element("div", f.used ? "" : "failed", f.used ? `✓ ${f.used}: ${f.why}` : `✗ none: ${f.why}`));
}

/** showServices fills the table of services. */
export function showServices(all) {
  const shown = all.filter((s) => s.clusters?.length || s.local?.global);
  byID("services").hidden = shown.length === 0;
  byID("servicecount").textContent = shown.length > most ? `the first ${most} of ${shown.length}; weft service list has all` : "";
  byID("servicerows").replaceChildren(...shown.slice(0, most).map((s) => element("tr", "",
    element("td", "", `${s.namespace}/${s.name}`),
    element("td", "mono", ...(s.frontends ?? []).map((f) => element("div", "", address(f)))),
    element("td", "", s.local?.affinity ?? ""),
    element("td", "", ...offers(s)),
    element("td", "", ...use(s)))));
}
