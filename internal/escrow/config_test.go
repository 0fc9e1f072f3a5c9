// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package escrow

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/internal/crdt"
)

func TestConfigSaysAllThatIsWrong(t *testing.T) {
	cfg := Config{
		Limit:   Limit{Rate: math.NaN(), Burst: 0},
		Limits:  map[string]Limit{"": {Rate: 1e10, Burst: 2e9}},
		MaxKeys: -1,
		Roster:  Roster{Members: []Member{{Name: ""}, {Name: "a", Weight: -2}, {Name: "a", Weight: 1, NoShare: true}}},
	}
	err := cfg.Validate()
	if !errors.Is(err, ErrConfig) {
		t.Fatal(err)
	}
	for _, want := range []string{
		"Limit.Rate: NaN is not in [0.001, 1e+09]", "Limit.Burst: 0 is not in [1, 1000000000]",
		`Limits[""]: 0 is not in [1, 128]`, `Limits[""].Rate: 1e+10`, `Limits[""].Burst: 2000000000`, "MaxKeys: -1",
		`Members[0].Name: ""`, "Members[1].Weight: -2", `Members[2].Name: "a"`, "Members[2].Weight: 1",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in\n%v", want, err)
		}
	}
	if err := (Config{Limit: Limit{1, 1}, Roster: Roster{Members: []Member{{Name: "a", NoShare: true}}}}).Validate(); !errors.Is(err, ErrConfig) {
		t.Errorf("nobody mints: %v", err)
	}
	good := Config{Limit: Limit{1000, 5}, Roster: Roster{Members: []Member{{Name: "a"}, {Name: "b"}}}}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	if w := good.Warnings(); len(w) != 1 || !strings.Contains(w[0], "want 12 or more") {
		t.Errorf("warnings: %q", w)
	}
	if _, err := NewNode(crdt.Replica{Name: "c"}, good, 0); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), `"c"`) {
		t.Errorf("not in the roster: %v", err)
	}
	if _, err := Local(Limit{}); !errors.Is(err, ErrConfig) {
		t.Errorf("no limit: %v", err)
	}
}

// Nodes must agree on all that the bound is made of, and on nothing else.
func TestFingerprint(t *testing.T) {
	base := func() Config {
		return Config{Limit: Limit{10, 5}, Limits: map[string]Limit{"k": {1, 1}}, Roster: Roster{Members: []Member{{Name: "a"}, {Name: "b", Weight: 2}}}}
	}
	same := base()
	same.Roster.Members[0], same.Roster.Members[1] = same.Roster.Members[1], same.Roster.Members[0]
	same.Roster.Members[1].Weight = 1
	same.MaxKeys = 7
	if same.fingerprint() != base().fingerprint() {
		t.Error("order, a default or MaxKeys makes another configuration")
	}
	for name, change := range map[string]func(*Config){
		"rate":     func(c *Config) { c.Limit.Rate++ },
		"burst":    func(c *Config) { c.Limit.Burst++ },
		"a key":    func(c *Config) { c.Limits["k"] = Limit{1, 2} },
		"number":   func(c *Config) { c.Roster.Number++ },
		"learners": func(c *Config) { c.Roster.Learners = true },
		"weight":   func(c *Config) { c.Roster.Members[1].Weight++ },
		"members":  func(c *Config) { c.Roster.Members = c.Roster.Members[:1] },
	} {
		c := base()
		if change(&c); c.fingerprint() == base().fingerprint() {
			t.Errorf("%s makes no difference", name)
		}
	}
}

// Shares are never more than the whole, and an owner is one member that mints it all.
func TestShares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := Config{Limit: Limit{Rate: rapid.Float64Range(.001, 1e9).Draw(t, "rate"), Burst: rapid.IntRange(1, 1e9).Draw(t, "burst")}}
		for i := range rapid.IntRange(1, 40).Draw(t, "members") {
			cfg.Roster.Members = append(cfg.Roster.Members, Member{Name: string(rune('A' + i)), Weight: rapid.IntRange(1, 1e6).Draw(t, "weight")})
		}
		caps, owners := int64(0), 0
		rate := 0.
		for _, m := range cfg.Roster.Members {
			n, err := NewNode(crdt.Replica{Name: m.Name}, cfg, 0)
			if err != nil {
				t.Fatal(err)
			}
			r := newRow(n, "k")
			caps += r.cap
			rate += float64(r.rate) / 1e9
			if r.here {
				owners++
			}
			if (r.owner != "") != (r.here || r.cap == 0) {
				t.Fatal("not an owner, and not spread")
			}
		}
		if most := int64(cfg.Limit.Burst) * micro; caps > most || caps < most-int64(len(cfg.Roster.Members)) {
			t.Fatal("the caps are not the burst")
		}
		if rate > cfg.Limit.Rate/(1+drift*1e-6)*(1+1e-12) || rate < cfg.Limit.Rate/(1+drift*1e-6)-1e-6 {
			t.Fatal("the rates are not the rate")
		}
		if owners > 1 {
			t.Fatal("two owners")
		}
	})
}

// Keys spread over owners, and an owner is where it was when others come and go.
func TestOwners(t *testing.T) {
	r := Roster{}
	for i := range 10 {
		r.Members = append(r.Members, Member{Name: string(rune('a' + i))})
	}
	less := Roster{Members: r.Members[:9]}
	count, moved := make([]int, 10), 0
	for i := range 10_000 {
		key := "orders." + time.Duration(i).String()
		h := r.owner(key, 5*micro)
		count[h]++
		if h < 9 && less.owner(key, 5*micro) != h {
			moved++
		}
	}
	for i, n := range count {
		if n < 850 || n > 1150 {
			t.Errorf("member %d is owner of %d of 10,000 keys", i, n)
		}
	}
	if moved > 0 {
		t.Errorf("%d keys moved that need not", moved)
	}
	if r.owner("k", 20*micro) != -1 || r.owner("k", 19*micro) < 0 {
		t.Error("the threshold is not two tokens a share")
	}
}

// Mint is exact whatever the steps, and never above the rate.
func TestMintIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := &row{cap: 1 << 55, rate: rapid.Uint64Range(1, 1e18).Draw(t, "rate")}
		now := time.Duration(0)
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			now += time.Duration(rapid.Int64Range(0, int64(20*ms)).Draw(t, "d"))
			r.mint(now, 0)
			r.mint(now-time.Duration(rapid.Int64Range(0, int64(now)).Draw(t, "back")), 0)
		}
		whole := &row{cap: 1 << 55, rate: r.rate}
		whole.mint(now, 0)
		if r.level != whole.level || r.minted != whole.minted {
			t.Fatal("steps mint other than the whole")
		}
		if d := r.until(r.level + 7*micro); d != never {
			before := *r
			before.mint(now+d-1, 0)
			r.mint(now+d, 0)
			if r.level < whole.level+7*micro || before.level >= whole.level+7*micro {
				t.Fatal("until is not when")
			}
		}
	})
}

func TestForecast(t *testing.T) {
	const window = 10 * ms
	f := &forecast{}
	if f.alpha() != .3 {
		t.Errorf("alpha %v without demand, want 0.3", f.alpha())
	}
	now := time.Duration(0)
	feed := func(windows int, amount int64) {
		for range windows {
			f.asked += amount
			now += window
			f.observe(now, window, 1e12)
		}
	}
	feed(100, 20*micro)
	if math.Abs(f.mean-20*micro) > 1e4 || f.alpha() < .95 {
		t.Errorf("steady 20: mean %v, alpha %v", f.mean/micro, f.alpha())
	}
	feed(1, 200*micro)
	if f.mean != 200*micro {
		t.Errorf("ten times as much is no jump: %v", f.mean/micro)
	}
	feed(1, 0)
	if f.mean != 0 {
		t.Errorf("an end is no jump: %v", f.mean/micro)
	}
	for range 100 { // one in ten windows: σ = 3μ
		feed(1, micro)
		feed(9, 0)
	}
	if f.alpha() != .3 || f.mean < .02*micro || f.mean > .3*micro {
		t.Errorf("rare demand: mean %v, alpha %v; want about 0.1 and 0.3", f.mean/micro, f.alpha())
	}
	f.asked = 1 << 60
	now += window
	f.observe(now, window, 50*micro)
	if f.mean > 50*micro {
		t.Errorf("mean %v above what the limit can give", f.mean/micro)
	}
	now += time.Hour
	f.observe(now, window, 1e12)
	if f.mean != 0 {
		t.Errorf("mean %v after an hour of nothing", f.mean)
	}
}

// A node that nobody asks anything of rests, and forgets.
func TestIdleCostsNothing(t *testing.T) {
	f := newFleet(t, 3, Limit{Rate: 1000, Burst: 100}, 1)
	f.run(3*time.Second, 1200, func(time.Duration) int { return 0 })
	f.pass(20 * time.Second)
	for i, s := range f.nodes {
		if s.Keys() != 0 || s.Wake() != never {
			t.Errorf("node %d: %d keys, wakes in %v", i, s.Keys(), s.Wake()-s.now)
		}
		for _, p := range s.Node.peers {
			if p.changes.First() != nil || p.lent.some() || p.held.some() {
				t.Errorf("node %d keeps something of %v", i, p.id)
			}
		}
	}
	packets, bytes := f.packets, f.bytes
	f.pass(30 * time.Second)
	if n := f.packets - packets; n > 6*200+10 || f.bytes-bytes > 12*n {
		t.Errorf("%d packets, %d bytes in 10 s of nothing; want the keep-alives of the session alone", n, f.bytes-bytes)
	}
}

// Time does not go back, whoever is late.
func TestTimeMovesForward(t *testing.T) {
	a, b := pairOf(t, Config{})
	now := 5 * time.Second
	late := []func(){
		func() { a.Tick(1) }, func() { a.Take(1, "k", 1) }, func() { a.Demand(1, "k", 1) }, func() { a.Serve(1, "k", 1) },
		func() { a.Withdraw(1, "k", 1) }, func() { a.View(1, "k") }, func() { a.Delta(1, nil, b.self, 0, 1200) },
		func() { _, _ = say(1, b, a) }, func() { a.Gone(1, crdt.Replica{Name: "b"}) },
	}
	a.Tick(now)
	for i, call := range late {
		if call(); a.now != now {
			t.Errorf("call %d set the time to %v", i, a.now)
		}
	}
}
