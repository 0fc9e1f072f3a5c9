// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

import { useEffect, useRef, useState } from "preact/hooks";
import { type FleetStatus, type Member, type Order, type Outcome, clipped, get, mostWhy, post } from "./api";
import { Table } from "./table";
import type { Words } from "./words";

const lasting = ["pause", "open"];
const counted = ["credits", "deadletter"];

// OrderDialog asks what an order needs, gives it, and shows what it did.
export function OrderDialog(p: { w: Words; title: string; order: Order; close: () => void }) {
  const { w, order } = p;
  const dialog = useRef<HTMLDialogElement>(null);
  const [members, setMembers] = useState<Member[]>([]);
  const [outcome, setOutcome] = useState<Outcome>();
  const [failed, setFailed] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    dialog.current!.showModal();
    get<FleetStatus>("fleet/status").then(
      (fleet) => setMembers(fleet.members),
      () => {}, // there is none
    );
  }, []);
  const give = async (e: SubmitEvent) => {
    e.preventDefault();
    const form = new FormData(e.target as HTMLFormElement);
    const text = (name: string) => String(form.get(name) ?? "");
    setBusy(true);
    setFailed("");
    try {
      const full: Order = { ...order, why: clipped(text("why"), mostWhy) };
      if (lasting.includes(order.action)) {
        full.for = text("for");
      }
      if (counted.includes(order.action)) {
        full.count = Number(text("count"));
      }
      if (text("in")) {
        full.in = text("in");
      }
      setOutcome(await post<Outcome>("order", full));
    } catch (e) {
      setFailed((e as Error).message);
    }
    setBusy(false);
  };
  const zones = [...new Set(members.flatMap((m) => m.zone || []))];
  return (
    <dialog ref={dialog} onClose={p.close} aria-labelledby="order-title">
      <h2 id="order-title">{p.title}</h2>
      <p class="name">{[...(order.sources ?? []), ...(order.breakers ?? [])].join(", ")}</p>
      {order.action === "deadletter" && <p class="warning">{w.deadletterWarning}</p>}
      {outcome ? (
        <>
          <OutcomeTable w={w} outcome={outcome} />
          <button type="button" onClick={() => dialog.current!.close()}>
            {w.done}
          </button>
        </>
      ) : (
        <form onSubmit={give}>
          {lasting.includes(order.action) && (
            <label>
              {w.for}
              <select name="for">
                <option value="5m">5 min</option>
                <option value="30m" selected>
                  30 min
                </option>
                <option value="2h">2 h</option>
                <option value="12h">12 h</option>
              </select>
            </label>
          )}
          {counted.includes(order.action) && (
            <label>
              {w.count}
              <input name="count" type="number" min="1" max="100000" required defaultValue="10" />
            </label>
          )}
          {members.length > 0 && (
            <label>
              {w.where}
              <select name="in">
                <option value="">{w.thisProcess}</option>
                <option value="fleet">{w.wholeFleet}</option>
                {zones.map((z) => (
                  <option key={z} value={"zone:" + z}>
                    {w.zone(z)}
                  </option>
                ))}
              </select>
            </label>
          )}
          <label>
            {w.reason}
            <input name="why" maxLength={200} />
          </label>
          {failed && <p role="alert">{failed}</p>}
          <p class="buttons">
            <button type="submit" disabled={busy}>
              {w.confirm}
            </button>
            <button type="button" onClick={() => dialog.current!.close()}>
              {w.cancel}
            </button>
          </p>
        </form>
      )}
    </dialog>
  );
}

function OutcomeTable({ w, outcome }: { w: Words; outcome: Outcome }) {
  return (
    <>
      {outcome.results.length > 0 && (
        <Table
          columns={[[w.source, "name"], w.before, w.after]}
          rows={outcome.results.map((r, i) => [i, r.source, r.before, r.error ?? (r.count ? `${r.after} (${r.count})` : r.after)])}
        />
      )}
      {outcome.processes && (
        <ul>
          {outcome.processes.map((a) => (
            <li key={a.process}>
              {a.process}: {a.error ?? a.sources}
            </li>
          ))}
        </ul>
      )}
      {outcome.silent && outcome.silent.length > 0 && <p role="alert">{w.silent(outcome.silent.join(", "))}</p>}
    </>
  );
}
