// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"github.com/stormguard-mq/stormguard/console"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/fleet"
	"github.com/stormguard-mq/stormguard/fleet/register"
	"github.com/stormguard-mq/stormguard/guard"
	"github.com/stormguard-mq/stormguard/limiter"
)

const patience = time.Minute

// need skips a test whose program is not here, but not where everything is to be tested.
func need(t *testing.T, program, remedy string) {
	t.Helper()
	if _, err := exec.LookPath(program); err == nil {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s is not here: %s", program, remedy)
	}
	t.Skipf("%s is not here: %s", program, remedy)
}

// The committed page is what the sources build, its types are right, and it is small.
func TestDistIsBuilt(t *testing.T) {
	need(t, "npm", "install Node.js and npm")
	files, err := build()
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if got, err := os.ReadFile(filepath.Join(dist, name)); err != nil || !bytes.Equal(got, text) {
			t.Errorf("console/dist/%s is not what `go run .` builds (%v)", name, err)
		}
	}
	there, err := os.ReadDir(dist)
	if err != nil || len(there) != len(files) {
		t.Errorf("%d files in console/dist, %d are built (%v)", len(there), len(files), err)
	}
}

// An operator looks at a storm from its beginning to its end, in both languages and both
// themes, below a path prefix: what the page shows is what the API says, and nothing of it
// is refused by the page's own policy, comes from elsewhere, or keeps anybody out.
func TestPageInAStorm(t *testing.T) {
	sys := newSystem(t, console.Config{Process: "billing-1"})
	b := newBrowser(t, sys.url)
	b.open("")
	b.until(`document.querySelector("main p.calm")`)
	b.look("at rest")

	sys.down.Store(true)
	sys.publish(40)
	b.until(`document.querySelector("main .state.breaker, main .state.storm")`)
	b.look("in an outage")
	b.open("#/sources")
	b.until(`document.querySelectorAll("tbody tr").length === 2`)
	sys.settled(t)
	var sources []console.Source
	sys.get(t, "sources", &sources)
	b.until(`[...document.querySelectorAll("tbody tr")].map(r => r.cells[0].innerText + " " + r.cells[4].innerText + " " + r.cells[6].innerText).join() === ` +
		quote(fmt.Sprintf("orders %d %d,refunds %d %d", inHand(sources[0]), sources[0].DeadLettered, inHand(sources[1]), sources[1].DeadLettered)))
	b.look("sources")
	b.open("#/sources/orders")
	b.until(`document.querySelector(".hold .state.breaker")`)
	b.look("a source")
	b.until(`/` + b.word("(open|half-open): .*its own probes", "(断开|半开)：.*自身的探测") + `/.test(document.querySelector(".hold").innerText)`)

	// A dead letter shows under its cause. That of an outage cannot be put in quarantine.
	order := `fetch("order", {method: "POST", headers: {"Content-Type": "application/json"}, body: '{"action":"deadletter","sources":["orders"],"count":1}'})`
	for end := time.Now().Add(patience); b.eval(order+`.then(a => a.json()).then(o => o.results[0].count || 0)`) != 1.0; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) { // while it probes nothing waits
			t.Fatal("no message can be dead-lettered")
		}
	}
	b.open("#/causes")
	b.until(`document.querySelector("tbody tr")?.cells[0].innerText === "1"`)
	var causes []console.Cause
	sys.get(t, "causes", &causes)
	b.until(`document.querySelector("tbody tr").cells[1].innerText === ` + quote(causes[0].Title))
	b.look("causes")
	b.until(`document.querySelector("tbody tr").cells[4].innerText === ` + quote(b.word("mend the dependency", "请修复依赖")))
	b.open("#/sources/orders")
	b.until(`document.querySelector(".hold .state.breaker")`)

	// The order goes through the dialog, and its result is shown.
	b.click("button", b.word("Pause", "暂停"))
	b.until(`document.querySelector("dialog[open] select[name=for]")`)
	b.look("a dialog")
	b.eval(`document.querySelector("dialog [name=why]").value = "ticket 7"; document.querySelector("dialog [name=for]").value = "2h"`)
	b.eval(`new Promise(r => setTimeout(r, 2500))`) // in which the page hears from the console, and must leave what is typed
	b.click("dialog button", b.word("Do it", "执行"))
	b.until(`document.querySelector("dialog tbody tr")?.innerText.includes("paused")`)
	b.click("dialog button", b.word("Done", "完成"))
	b.until(`document.querySelector(".hold .state.operator")`)
	for sys.source(t, "orders").RetryWait > 0 { // what has failed is due again, and held: it can be dead-lettered all the same
		time.Sleep(50 * time.Millisecond)
	}
	b.until(`[...document.querySelectorAll("button")].some(b => b.innerText === ` + quote(b.word("Dead-letter what waits", "把等待的消息转为死信")) + ` && !b.disabled)`)
	if s := sys.source(t, "orders"); s.Holds[0].Reason != "operator" && s.State != "paused" {
		t.Errorf("%+v", s)
	}
	b.open("#/audit")
	b.until(`document.querySelector("tbody tr")?.innerText.includes("pause orders for 2h0m0s") && document.querySelector("tbody tr").innerText.includes("ticket 7")`)
	b.look("audit")
	b.open("#/quarantine")
	b.until(`document.querySelector("main form")`)
	b.eval(`document.querySelector("[name=value]").value = "42"`)
	b.eval(`document.querySelector("main form").requestSubmit()`)
	b.until(`[...document.querySelectorAll("tbody tr")].some(r => r.cells[0].innerText === "key=42")`)
	b.look("quarantine")
	b.open("#/events")
	b.until(`document.querySelector("main").innerText.includes(` + quote(b.word("breaker opened", "熔断器断开")) + `)`)
	b.look("events")
	b.open("#/fleet")
	b.until(`document.querySelector("main p")`)
	b.look("fleet")
	b.open("#/topology")
	b.until(`[...document.querySelectorAll("svg .node text")].map(e => e.textContent).sort().join() === "billing,gateway,orders,refunds,shop"`)
	b.until(`document.querySelectorAll("svg .way.bad").length === 1`) // orders is held, refunds is not
	var flows []console.Flow
	sys.get(t, "topology", &flows)
	b.until(`[...document.querySelectorAll("tbody tr")].map(r => r.cells[3].innerText).join() === ` + quote(counts(flows)))
	b.look("topology")
	b.open("#/heat")
	b.until(`document.querySelector("canvas")?.dataset.drawn`)
	b.look("heat map")
	b.pixels()

	sys.down.Store(false)
	b.open("#/sources/orders")
	b.until(`!document.querySelector("main button:disabled")?.innerText.includes(` + quote(b.word("Resume", "恢复")) + `)`)
	b.click("button", b.word("Resume", "恢复"))
	b.click("dialog button", b.word("Do it", "执行"))
	b.click("dialog button", b.word("Done", "完成"))
	b.until(`document.querySelector("h1 + p .state.running")`)
	b.open("#/now")
	b.until(`document.querySelector("main p.calm")`)

	// That of a message can.
	sys.publish(1)
	sys.orders <- poison
	b.open("#/causes")
	b.until(`document.querySelectorAll("tbody tr").length === 2`)
	b.eval(`window.confirm = () => true`)
	b.click("tbody button", b.word("Quarantine", "隔离"))
	b.until(`[...document.querySelectorAll("tbody tr")].some(r => r.cells[4].innerText === ` + quote(b.word("in quarantine", "已隔离")) + `)`)
	var rules []console.Rule
	sys.get(t, "quarantine", &rules)
	sys.get(t, "causes", &causes)
	if !slices.ContainsFunc(rules, func(r console.Rule) bool {
		return r.Rule == "cause="+causes[1].Cause || r.Rule == "cause="+causes[0].Cause
	}) {
		t.Errorf("rules %+v, causes %+v", rules, causes)
	}
	b.judge()
}

// poison is a message that no handler can handle.
const poison = -1

func counts(flows []console.Flow) string {
	var all []string
	for _, f := range flows {
		all = append(all, strconv.FormatUint(f.Count, 10))
	}
	return strings.Join(all, ",")
}

// The page of a process that is in a fleet shows its members, its limits and its journal, and
// follows a change.
func TestPageOfAFleet(t *testing.T) {
	var store register.Memory
	start := func(name string, seeds ...string) *fleet.Process {
		p, err := fleet.Start(fleet.Config{
			Fleet: "trial", Name: name,
			Limits: fleet.Limits{Limit: limiter.Limit{Rate: 1000, Burst: 100}, Roster: fleet.Roster{Members: []fleet.Share{{Name: "a"}, {Name: "b"}}}},
			Gossip: fleet.Gossip{Zone: "z1", Bind: "127.0.0.1:0", Seeds: seeds},
		}, fleet.WithRegister(&store))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		return p
	}
	first := start("a")
	second := start("b", first.Addr().String())
	sys := newSystem(t, console.Config{Process: "a", Fleet: first.Orders()})
	b := newBrowser(t, sys.url)
	b.open("#/fleet")
	heard := func(a, b string) string {
		return `[...document.querySelectorAll("section:first-of-type tbody tr")].map(r => r.cells[0].innerText + " " + r.cells[2].innerText.split(" ")[0]).join() === ` + quote("a "+a+",b "+b)
	}
	b.until(heard("yes", "yes"))
	b.until(`document.querySelector("main").innerText.includes("1,000 a second, burst 100")`)
	// A key that lies idle is forgotten, so it is used until the page has shown it.
	use := func(p *fleet.Process, key string) (stop func()) {
		over := make(chan bool)
		var using sync.WaitGroup
		using.Go(func() {
			for tick := time.Tick(10 * time.Millisecond); ; {
				p.Key(key).Allow()
				select {
				case <-tick:
				case <-over:
					return
				}
			}
		})
		return sync.OnceFunc(func() { close(over); using.Wait() })
	}
	stop := use(second, "gateway")
	defer stop()
	b.until(`[...document.querySelectorAll("tbody tr")].some(r => r.cells[0].innerText === "gateway" && r.cells[2].innerText.match(/^[1-9]/))`)
	stop()
	if _, err := first.Set(t.Context(), fleet.Change{Limit: &limiter.Limit{Rate: 500, Burst: 50}}); err != nil {
		t.Fatal(err)
	}
	b.until(`document.querySelector("main").innerText.includes("500 a second, burst 50")`)
	if _, err := first.Set(t.Context(), fleet.Change{Limits: map[string]*limiter.Limit{"x": {Rate: 7, Burst: 9}}}); err != nil {
		t.Fatal(err)
	}
	b.until(`[...document.querySelectorAll("tbody tr")].some(r => r.cells[0].innerText === "x" && r.cells[1].innerText === "7 a second, burst 9")`)
	// A name that every object of JavaScript has.
	stopOther := use(first, "constructor")
	defer stopOther()
	b.until(`[...document.querySelectorAll("tbody tr")].some(r => r.cells[0].innerText === "constructor" && r.cells[1].innerText === "500 a second, burst 50")`)
	var journal []fleet.Entry
	sys.get(t, "fleet/journal", &journal)
	b.until(fmt.Sprintf(`document.querySelectorAll("section:last-of-type tbody tr").length >= %d`, len(journal)))
	b.look("a fleet")
	b.choose(0, "language", "en")
	second.Close()
	b.until(heard("yes", "no"))
	b.judge()
}

// A console with tokens shows nothing before it has one, and a wrong one opens nothing.
func TestPageAsksForToken(t *testing.T) {
	const secret = "0123456789abcdef"
	sys := newSystem(t, console.Config{Process: "billing-1", Tokens: []console.Token{{Name: "ann", Secret: secret}}})
	b := newBrowser(t, sys.url)
	for _, token := range []string{"", "not the right one", secret} {
		if token == "" {
			b.open("")
		} else {
			b.eval(`document.querySelector("[name=token]").value = ` + quote(token) + `; document.querySelector("form").requestSubmit()`)
		}
		if token == secret {
			b.until(`document.querySelector("main p.calm")`)
			continue
		}
		b.until(`document.querySelector("[name=token]")`)
		if shown := b.eval(`document.body.innerText`); strings.Contains(fmt.Sprint(shown), "billing-1") {
			t.Errorf("with token %q: %v", token, shown)
		}
	}
	b.judge()
}

// A thousand sources over six hours are drawn, and how long that took is told.
func TestHeatOfAThousandSources(t *testing.T) {
	sys := newSystem(t, console.Config{Process: "billing-1"})
	h := console.History{Every: 60, Now: time.Now().UTC()}
	for i := range 1000 {
		cells := []byte(strings.Repeat("r", 360))
		for k := range 12 { // an hour of storm in pieces
			for m := range 5 {
				cells[(i*7+k*29+m)%360] = "bsdop"[(i+k)%5]
			}
		}
		h.Rows = append(h.Rows, console.HistoryRow{Source: fmt.Sprintf("orders/%03d", i), Cells: string(cells)})
	}
	sys.history.Store(&h)
	b := newBrowser(t, sys.url)
	b.open("#/heat")
	b.until(`document.querySelector("canvas")?.dataset.drawn`)
	t.Logf("drawn in %v ms", b.eval(`document.querySelector("canvas").dataset.drawn`))
	b.judge()
}

func inHand(s console.Source) int {
	return s.Waiting + s.Processing + s.Settling + s.Holding + s.RetryWait
}

func quote(s string) string {
	text, _ := json.Marshal(s)
	return string(text)
}

// system is a program with a console, below /ops.
type system struct {
	url     string
	down    atomic.Bool
	orders  chan int
	n       int
	handler http.Handler
	history atomic.Pointer[console.History] // in place of the console's own
}

func newSystem(t *testing.T, cfg console.Config) *system {
	t.Helper()
	sys := &system{orders: make(chan int, 1000)}
	g, err := guard.New(guard.Config{Group: "billing"}, guard.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	var loops sync.WaitGroup
	for name, in := range map[string]chan int{"orders": sys.orders, "refunds": make(chan int)} {
		letters := dlq.WriterFunc(func(context.Context, *dlq.Record) error { return nil })
		src, err := guard.Open(g, guard.SourceConfig{Name: name, DeadLetters: letters}, guard.Limits{}, numbers{}, func(ctx context.Context, m int) (err error) {
			done := guard.Calls(ctx, "gateway")
			defer func() { done(err) }()
			if m == poison {
				return guard.Permanent(errors.New("the order has no items"))
			}
			if sys.down.Load() {
				return guard.Unavailable(errors.New("the gateway is down"))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		loops.Go(func() { _ = src.Run(context.Background(), in) })
	}
	c, err := console.New(cfg, g)
	if err != nil {
		t.Fatal(err)
	}
	sys.handler = c
	mux := http.NewServeMux()
	mux.Handle("/ops/", http.StripPrefix("/ops", c))
	mux.HandleFunc("GET /ops/history", func(w http.ResponseWriter, r *http.Request) {
		if h := sys.history.Load(); h != nil {
			_ = json.NewEncoder(w).Encode(h)
			return
		}
		http.StripPrefix("/ops", c).ServeHTTP(w, r)
	})
	server := httptest.NewServer(mux)
	sys.url = server.URL + "/ops/"
	t.Cleanup(func() {
		c.Close()
		server.CloseClientConnections()
		server.Close()
		if _, err := g.Close(context.Background()); err != nil {
			t.Error(err)
		}
		loops.Wait()
	})
	return sys
}

func (sys *system) publish(n int) {
	for range n {
		sys.orders <- sys.n
		sys.n++
	}
}

func (sys *system) get(t *testing.T, path string, to any) {
	t.Helper()
	resp, err := http.Get(sys.url + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(to); err != nil {
		t.Fatal(err)
	}
}

func (sys *system) source(t *testing.T, name string) console.Source {
	t.Helper()
	var all []console.Source
	sys.get(t, "sources?name="+name, &all)
	return all[0]
}

// settled waits until all that was published is in the source's hands.
func (sys *system) settled(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(patience); inHand(sys.source(t, "orders")) < 40; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the source does not take what is published")
		}
	}
}

// numbers is a port whose messages are numbers.
type numbers struct{}

func (numbers) Lane(int) uint64 { return 0 }
func (numbers) Size(int) int    { return 1 }
func (numbers) Meta(m int) guard.Meta {
	return guard.Meta{Body: fmt.Append(nil, m), Headers: []dlq.Header{{Name: "ce_source", Value: "shop"}}, Lag: -1}
}
func (numbers) Ack(int) error                    { return nil }
func (numbers) Extend([]int)                     {}
func (numbers) Return([]int, guard.Reason) error { return nil }
func (numbers) Demand(int)                       {}
func (numbers) Flush() error                     { return nil }

// browser is one page in Chromium.
type browser struct {
	t       *testing.T
	ctx     context.Context
	url     string
	chinese bool

	mu      sync.Mutex
	foreign []string
}

func newBrowser(t *testing.T, url string) *browser {
	t.Helper()
	need(t, "chromium", "install Chromium (Debian: chromium, and fonts-noto-cjk)")
	b := &browser{t: t, url: url}
	options := append([]chromedp.ExecAllocatorOption{}, chromedp.DefaultExecAllocatorOptions[:]...)
	options = append(options, chromedp.ExecPath("chromium"), chromedp.NoSandbox,
		chromedp.Flag("disable-gpu", true), chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true))
	// Its folder is chromedp's, which removes it again and again: processes of Chromium write there after its end.
	browser, end := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(end)
	ctx, cancel := chromedp.NewContext(browser, chromedp.WithListener(func(ev any) {
		if e, ok := ev.(*network.EventRequestWillBeSent); ok && !strings.HasPrefix(e.Request.URL, url) && !strings.HasPrefix(e.Request.URL, "data:") {
			b.mu.Lock()
			b.foreign = append(b.foreign, e.Request.URL)
			b.mu.Unlock()
		}
	}))
	t.Cleanup(cancel)
	b.ctx = ctx
	if err := chromedp.Do(ctx, chromedp.EmulateViewport(1280, 900)); err != nil {
		t.Fatal(err)
	}
	watch := func(ctx context.Context, t *chromedp.Target) (page.AddScriptToEvaluateOnNewDocumentResult, error) {
		return cdp.Call(ctx, t, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: `window.refused = [];
			document.addEventListener("securitypolicyviolation", e => window.refused.push(e.violatedDirective + " " + e.blockedURI));
			window.addEventListener("error", e => window.refused.push(e.message));`})
	}
	if _, err := chromedp.Run(ctx, watch); err != nil {
		t.Fatal(err)
	}
	return b
}

// open goes to a page of the console.
func (b *browser) open(page string) {
	b.t.Helper()
	if page != "" && b.eval(`location.href.startsWith(`+quote(b.url)+`)`) == true {
		b.eval(`location.hash = ` + quote(page))
		return
	}
	if err := chromedp.Do(b.ctx, chromedp.Navigate(b.url+page)); err != nil {
		b.t.Fatal(err)
	}
	b.until(`document.querySelector("header")`)
}

func (b *browser) eval(js string) any {
	b.t.Helper()
	v, err := chromedp.Run(b.ctx, chromedp.Evaluate[any](js, chromedp.EvalAwaitPromise))
	if err != nil {
		b.t.Fatalf("%s: %v", js, err)
	}
	return v
}

func (b *browser) until(js string) {
	b.t.Helper()
	for end := time.Now().Add(patience); b.eval(`Boolean(`+js+`)`) != true; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			b.t.Fatalf("not in %s: %s; the page says:\n%v", patience, js, b.eval(`document.body.innerText`))
		}
	}
}

func (b *browser) click(what, text string) {
	b.t.Helper()
	find := `[...document.querySelectorAll(` + quote(what) + `)].find(e => e.innerText === ` + quote(text) + ` && !e.disabled)`
	b.until(find)
	b.eval(find + `.click()`)
}

func (b *browser) word(en, zh string) string {
	if b.chinese {
		return zh
	}
	return en
}

// look judges the page that is open by axe, in both languages, both themes, and as wide as a
// phone. Pictures of it go to $STORMGUARD_PICTURES, if that is set.
func (b *browser) look(name string) {
	b.t.Helper()
	axe, err := os.ReadFile(filepath.Join("node_modules", "axe-core", "axe.min.js"))
	if err != nil {
		b.t.Fatal(err)
	}
	if b.eval(`typeof axe`) != "object" {
		b.eval(string(axe) + "; true")
	}
	for _, theme := range []string{"light", "dark"} {
		b.choose(1, "theme", theme)
		for _, language := range []string{"en", "zh-CN"} {
			b.choose(0, "language", language)
			b.chinese = language != "en"
			text := fmt.Sprint(b.eval(`document.querySelector("header").innerText`))
			if chinese := strings.Contains(text, "现状"); chinese != b.chinese {
				b.t.Errorf("%s: in %s the header is %q", name, language, text)
			}
			if found := b.eval(`axe.run(document, {resultTypes: ["violations"]}).then(r => r.violations.map(v => v.id + ": " + v.nodes.map(n => n.html).slice(0, 3).join(" ")).join("\n"))`); found != "" {
				b.t.Errorf("%s, %s, %s: axe found\n%v", name, theme, language, found)
			}
			b.picture(name + "-" + theme + "-" + language)
		}
	}
	for _, width := range []int64{360, 1280} {
		if err := chromedp.Do(b.ctx, chromedp.EmulateViewport(width, 900)); err != nil {
			b.t.Fatal(err)
		}
		if over := b.eval(`document.documentElement.scrollWidth - document.documentElement.clientWidth`); over != 0.0 {
			b.t.Errorf("%s: at a width of %d the page is %v pixels too wide", name, width, over)
		}
		if width == 360 {
			b.picture(name + "-phone")
		}
	}
}

// choose presses a button of the header until the page has a language or a theme.
func (b *browser) choose(button int, what, want string) {
	b.t.Helper()
	is := `document.documentElement.` + map[string]string{"theme": "dataset.theme", "language": "lang"}[what] + ` === ` + quote(want)
	if b.eval(is) != true {
		b.eval(fmt.Sprintf(`document.querySelectorAll("header button")[%d].click()`, button))
		b.until(is)
	}
}

func (b *browser) picture(name string) {
	dir := os.Getenv("STORMGUARD_PICTURES")
	if dir == "" {
		return
	}
	png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, strings.ReplaceAll(name, " ", "-")+".png"), png, 0o600)
	}
	if err != nil {
		b.t.Error(err)
	}
}

// pixels compares the last cells of the heat map's rows with the legend: axe does not see a
// canvas. Each colour differs from the paper as much as the guideline for graphics wants,
// but that of a running source, which says nothing.
func (b *browser) pixels() {
	b.t.Helper()
	for _, theme := range []string{"light", "dark"} {
		b.choose(1, "theme", theme)
		b.until(`(() => {
			const c = document.querySelector("canvas"), g = c.getContext("2d"), s = c.width / c.clientWidth;
			const p = [...g.getImageData(c.width - 2, 9 * s, 1, 1).data].slice(0, 3).join();
			const known = [...document.querySelectorAll(".swatch")].map(e => getComputedStyle(e).backgroundColor.match(/\d+/g).slice(0, 3).join());
			return known.slice(3, 7).includes(p); // operator, breaker, storm, dlq: orders is paused and its breaker open
		})()`)
		low := b.eval(`(() => {
			const light = c => { const [r, g, b] = c.match(/\d+/g).map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
			const paper = light(getComputedStyle(document.body).backgroundColor);
			return [...document.querySelectorAll(".swatch")].slice(1).map(e => { const l = light(getComputedStyle(e).backgroundColor); return [e.className, (Math.max(l, paper) + 0.05) / (Math.min(l, paper) + 0.05)]; }).filter(x => x[1] < 2).join();
		})()`)
		if low != "" {
			b.t.Errorf("%s: too little contrast with the paper: %v", theme, low)
		}
	}
}

// judge is the end of a test: nothing was refused by the policy, no error was thrown, and
// nothing was asked of another host.
func (b *browser) judge() {
	b.t.Helper()
	if refused := b.eval(`window.refused.join("\n")`); refused != "" {
		b.t.Errorf("refused: %v", refused)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.foreign) > 0 {
		b.t.Errorf("asked elsewhere: %v", b.foreign)
	}
}
