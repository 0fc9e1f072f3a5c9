// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Refused, type Seen, type Status, hasToken, setToken, watch } from "./api";
import { Heat } from "./heat";
import { Fleet } from "./fleet";
import { Audit, Causes, Events, Now, Quarantine, SourcePage, Sources } from "./pages";
import { Topology } from "./topology";
import { type Language, type Words, languages } from "./words";

type Live = { status?: Status; sources: Map<string, Seen>; error?: Refused };

// useLive follows the console. When it is away it asks again, each second.
function useLive(): [Live, () => void] {
  const [live, setLive] = useState<Live>({ sources: new Map() });
  const [tries, again] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    let timer = 0;
    const sources = new Map<string, Seen>();
    watch(stop.signal, (c) => {
      for (const s of c.sources) {
        sources.set(s.group + " " + s.name, { ...s, at: Date.now() });
      }
      for (const key of c.gone ?? []) {
        sources.delete(key);
      }
      setLive({ status: c.status, sources });
    }).catch((e: unknown) => {
      if (stop.signal.aborted) {
        return;
      }
      const error = e instanceof Refused ? e : new Refused(0, String(e));
      setLive((l) => ({ ...l, error }));
      if (error.status !== 401) {
        timer = window.setTimeout(() => again(tries + 1), 1000);
      }
    });
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [tries]);
  return [live, () => again(tries + 1)];
}

function useRoute(): string[] {
  const parse = () => {
    try {
      return location.hash.replace(/^#\//, "").split("/").map(decodeURIComponent);
    } catch {
      return []; // typed in, and not encoded
    }
  };
  const [route, setRoute] = useState(parse);
  useEffect(() => {
    const change = () => {
      setRoute(parse());
      document.querySelector("main")?.focus();
    };
    window.addEventListener("hashchange", change);
    return () => window.removeEventListener("hashchange", change);
  }, []);
  return route;
}

// useKept is a choice that stays in this browser.
function useKept<T extends string>(key: string, first: T): [T, (v: T) => void] {
  const [value, setValue] = useState<T>(() => (localStorage.getItem(key) as T | null) ?? first);
  return [
    value,
    (v) => {
      localStorage.setItem(key, v);
      setValue(v);
    },
  ];
}

const pages = ["now", "sources", "heat", "topology", "fleet", "causes", "quarantine", "events", "audit"] as const;

function App() {
  const [language, setLanguage] = useKept<Language>("stormguard-language", navigator.language.startsWith("zh") ? "zh" : "en");
  const dark = window.matchMedia("(prefers-color-scheme: dark)").matches;
  const [theme, setTheme] = useKept<"dark" | "light">("stormguard-theme", dark ? "dark" : "light");
  const [live, again] = useLive();
  const [page, name] = useRoute();
  const w = languages[language] ?? languages.en;
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  document.documentElement.dataset["theme"] = theme;
  document.title = (live.status ? live.status.process + " · " : "") + "stormguard";
  return (
    <>
      <header>
        <a class="skip" href="#main" onClick={(e) => (e.preventDefault(), document.querySelector("main")?.focus())}>
          {w.skip}
        </a>
        <strong>stormguard</strong>
        <span class="name">{live.status?.process}</span>
        <span class={"lamp " + (live.error ? "off" : "on")}>{live.error ? "" : w.connected}</span>
        <nav>
          {pages.map((p) => (
            <a key={p} href={"#/" + p} aria-current={(page || "now") === p ? "page" : undefined}>
              {w[p]}
              {p === "now" && live.status && live.status.held > 0 ? ` (${live.status.held})` : ""}
            </a>
          ))}
        </nav>
        <button type="button" lang={language === "zh" ? "en" : "zh-CN"} onClick={() => setLanguage(language === "zh" ? "en" : "zh")}>
          {w.language}
        </button>
        <button type="button" onClick={() => setTheme(theme === "dark" ? "light" : "dark")}>
          {theme === "dark" ? w.light : w.dark}
        </button>
      </header>
      <main id="main" tabIndex={-1}>
        {live.error?.status === 401 ? (
          <TokenForm w={w} entered={again} />
        ) : (
          <>
            {live.error && (
              <p role="alert">
                {w.away} {live.error.message}
              </p>
            )}
            {live.status && <Page w={w} theme={theme} live={live} status={live.status} page={page || "now"} name={name} />}
          </>
        )}
      </main>
    </>
  );
}

function Page(p: { w: Words; theme: string; live: Live; status: Status; page: string; name?: string }) {
  const { w, live } = p;
  switch (p.page) {
    case "sources":
      if (p.name) {
        const all = [...live.sources.values()].filter((s) => s.name === p.name);
        return all.length === 0 ? (
          <SourcePage w={w} name={p.name} />
        ) : (
          <>
            {all.map((s) => (
              <SourcePage key={s.group} w={w} s={s} name={s.name} />
            ))}
          </>
        );
      }
      return <Sources w={w} all={[...live.sources.values()].sort((a, b) => (a.name < b.name ? -1 : 1))} />;
    case "heat":
      return <Heat w={w} theme={p.theme} />;
    case "fleet":
      return <Fleet w={w} joined={p.status.fleet} />;
    case "topology":
      return <Topology w={w} />;
    case "causes":
      return <Causes w={w} />;
    case "quarantine":
      return <Quarantine w={w} />;
    case "events":
      return <Events w={w} />;
    case "audit":
      return <Audit w={w} />;
    default:
      return <Now w={w} status={p.status} />;
  }
}

function TokenForm({ w, entered }: { w: Words; entered: () => void }) {
  return (
    <form
      onSubmit={(e) => {
        e.preventDefault();
        setToken(String(new FormData(e.currentTarget).get("token")));
        entered();
      }}
    >
      <h1>{w.tokenNeeded}</h1>
      {hasToken() && <p role="alert">{w.tokenWrong}</p>}
      <label>
        {w.token}
        <input name="token" type="password" autocomplete="off" required />
      </label>
      <button type="submit">{w.enter}</button>
    </form>
  );
}

render(<App />, document.body);
