// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package credit

import (
	"math"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/dlq"
)

func newBudget(t testing.TB, c dlq.BudgetConfig) *Budget {
	t.Helper()
	b, err := New(c, 0)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// drain spends the class's balance at now and returns how much that was.
func drain(b *Budget, now time.Duration, class Class) int {
	n := 0
	for b.Balance(class) >= 1 {
		b.Spend(now, class)
		n++
	}
	return n
}

func TestOutageSpends(t *testing.T) {
	tests := []struct {
		class Class
		after time.Duration
		want  uint64
	}{
		{Exhausted, 5*time.Minute - 1, 20},
		{Exhausted, 5 * time.Minute, 21},
		{Exhausted, time.Hour, 32},
		{Exhausted, 24 * time.Hour, 308},
		{Permanent, 5 * time.Minute, 501},
		{Permanent, time.Hour, 512},
	}
	for _, tt := range tests {
		b := newBudget(t, dlq.BudgetConfig{})
		b.Successes(1 << 40) // years of good traffic save up no more than the balance
		asked := uint64(0)
		ask := func(now time.Duration) { b.Spend(now, tt.class); asked++ }
		for range 1000 {
			ask(0)
		}
		for now := time.Second; now < tt.after; now += time.Second {
			ask(now)
		}
		ask(tt.after)
		ask(tt.after)
		if got := b.Spent(); got != tt.want {
			t.Errorf("%v after %v: spent %d, want %d", tt.class, tt.after, got, tt.want)
		}
		if b.Refused() != asked-tt.want {
			t.Errorf("%v after %v: refused %d of %d", tt.class, tt.after, b.Refused(), asked)
		}
	}
}

func TestFreeCredit(t *testing.T) {
	const every = 5 * time.Minute
	b := newBudget(t, dlq.BudgetConfig{})
	if at, wait := b.Next(time.Hour, Exhausted); wait || at != time.Hour {
		t.Errorf("full: next at %v, wait %v", at, wait)
	}
	spentAt := time.Hour
	drain(b, spentAt, Exhausted)
	if at, wait := b.Next(spentAt, Exhausted); !wait || at != spentAt+every {
		t.Errorf("spent: next at %v, wait %v", at, wait)
	}
	if _, wait := b.Next(spentAt, Permanent); wait {
		t.Error("the other class waits too")
	}
	if b.Spend(spentAt+every-1, Exhausted) {
		t.Error("granted a nanosecond early")
	}
	// Six hours without a dead letter leave one free credit, not 72.
	now := spentAt + 6*time.Hour
	if at, wait := b.Next(now, Exhausted); wait || at != now {
		t.Errorf("due: next at %v, wait %v", at, wait)
	}
	if b.Balance(Exhausted) != 0 {
		t.Errorf("balance %v with a free credit due, want 0", b.Balance(Exhausted))
	}
	if !b.Spend(now, Exhausted) || b.Spend(now, Exhausted) {
		t.Error("want exactly one free credit")
	}
	if at, wait := b.Next(now, Exhausted); !wait || at != now+every {
		t.Errorf("after the free one: next at %v, wait %v", at, wait)
	}
	// Earning a credit and spending it starts the wait anew.
	b.Successes(10)
	now += 4 * time.Minute
	if !b.Spend(now, Exhausted) || b.Spend(now+every-1, Exhausted) || !b.Spend(now+every, Exhausted) {
		t.Error("want the earned credit, then a free one five minutes later")
	}
}

func TestTenSuccessesEarnOne(t *testing.T) {
	b := newBudget(t, dlq.BudgetConfig{})
	drain(b, 0, Exhausted)
	drain(b, 0, Permanent)
	for total := range uint64(1000) {
		b.Successes(total)
		if got, want := b.Spend(0, Exhausted), total > 0 && total%10 == 0; got != want {
			t.Fatalf("after %d successes: exhausted %v, want %v", total, got, want)
		}
		if got, want := b.Spend(0, Permanent), total > 0 && total%2 == 0; got != want {
			t.Fatalf("after %d successes: permanent %v, want %v", total, got, want)
		}
	}
}

func TestSuccessesEarnUpToBalance(t *testing.T) {
	for _, n := range []uint64{1, 199, 200, 201, 1 << 32, math.MaxUint64 - 1000, math.MaxUint64} {
		b := newBudget(t, dlq.BudgetConfig{Earn: 0.3, Balance: 20.5, PermanentBalance: 7})
		b.Successes(n)
		if e, p := b.Balance(Exhausted), b.Balance(Permanent); e != 20.5 || p != 7 {
			t.Errorf("%d successes on full: %v, %v", n, e, p)
		}
		b = newBudget(t, dlq.BudgetConfig{Earn: 0.3, Balance: 20.5, PermanentBalance: 7})
		drain(b, 0, Exhausted)
		drain(b, 0, Permanent)
		b.Successes(n)
		wantE := min(20.5, 0.5+float64(n)*0.3)
		wantP := min(7, float64(n)*0.5)
		if e, p := b.Balance(Exhausted), b.Balance(Permanent); e != wantE || p != wantP {
			t.Errorf("%d successes on spent: %v, %v, want %v, %v", n, e, p, wantE, wantP)
		}
	}
}

// The product of these successes and 0.1 credits wraps around to nearly none.
func TestEarningDoesNotWrap(t *testing.T) {
	b := newBudget(t, dlq.BudgetConfig{})
	drain(b, 0, Exhausted)
	b.Successes(math.MaxUint64/100_000 + 1)
	if got := b.Balance(Exhausted); got != 20 {
		t.Errorf("balance %v, want 20", got)
	}
}

func TestCreditsAreExact(t *testing.T) {
	for n := range credits(1_000_000) {
		if got := toCredits(float64(n) / 1e6); got != n {
			t.Fatalf("%d millionths became %d", n, got)
		}
	}
}

func TestBudgetIgnoresSmallerTotals(t *testing.T) {
	b := newBudget(t, dlq.BudgetConfig{})
	drain(b, 0, Exhausted)
	for i, tt := range []struct {
		total, ignored uint64
		want           float64
	}{
		{100, 0, 10}, {90, 1, 10}, {0, 2, 10}, {100, 2, 10}, {50, 3, 10}, {105, 3, 10.5}, {math.MaxUint64, 3, 20}, {4, 4, 20},
	} {
		b.Successes(tt.total)
		if b.Balance(Exhausted) != tt.want || b.Ignored() != tt.ignored {
			t.Errorf("%d: total %d: balance %v, ignored %d; want %v, %d", i, tt.total, b.Balance(Exhausted), b.Ignored(), tt.want, tt.ignored)
		}
	}
	drain(b, 0, Exhausted)
	b.Successes(1000)
	if b.Balance(Exhausted) != 0 {
		t.Errorf("a counter that wrapped minted %v", b.Balance(Exhausted))
	}
}

func TestGrant(t *testing.T) {
	b := newBudget(t, dlq.BudgetConfig{})
	for _, n := range []float64{0, -5, math.NaN(), math.Inf(-1)} {
		b.Grant(n)
	}
	if b.Balance(Exhausted) != 20 || b.Balance(Permanent) != 500 {
		t.Fatalf("balance %v, %v", b.Balance(Exhausted), b.Balance(Permanent))
	}
	b.Grant(1000)
	b.Successes(1 << 50)
	if b.Balance(Exhausted) != 1020 || b.Balance(Permanent) != 1500 {
		t.Fatalf("balance %v, %v", b.Balance(Exhausted), b.Balance(Permanent))
	}
	// The gift is shared: what one class takes of it the other has not.
	if n := drain(b, 0, Exhausted); n != 1020 {
		t.Errorf("exhausted spent %d, want 1020", n)
	}
	if n := drain(b, 0, Permanent); n != 500 {
		t.Errorf("permanent spent %d, want 500", n)
	}

	// A class made spent by the other one waits a full turn as well.
	b = newBudget(t, dlq.BudgetConfig{Balance: 1, PermanentBalance: 1})
	b.Spend(0, Exhausted)
	b.Grant(1)
	const now = time.Hour
	b.Spend(now, Permanent)
	b.Spend(now, Permanent)
	if b.Spend(now, Exhausted) {
		t.Error("granted: the gift was gone")
	}
	for c := range Class(classes) {
		if at, wait := b.Next(now, c); !wait || at != now+5*time.Minute {
			t.Errorf("%v: next at %v, wait %v", c, at, wait)
		}
	}

	// Parts of a credit add up to one.
	b = newBudget(t, dlq.BudgetConfig{})
	drain(b, 0, Exhausted)
	b.Successes(7)
	b.Grant(0.3)
	if !b.Spend(0, Exhausted) || b.Balance(Exhausted) != 0 {
		t.Errorf("0.7 earned and 0.3 granted: balance %v", b.Balance(Exhausted))
	}

	b.Grant(math.Inf(1))
	b.Grant(math.MaxFloat64)
	if got := b.Balance(Exhausted); got != 1e12 {
		t.Errorf("balance %v, want 1e12", got)
	}
}

func TestBudgetOff(t *testing.T) {
	b := newBudget(t, dlq.BudgetConfig{Off: true})
	for range 1000 {
		if !b.Spend(0, Exhausted) {
			t.Fatal("refused")
		}
	}
	if _, wait := b.Next(0, Exhausted); wait || b.Spent() != 1000 || b.Refused() != 0 || b.Balance(Exhausted) != 20 {
		t.Errorf("wait %v, spent %d, refused %d, balance %v", wait, b.Spent(), b.Refused(), b.Balance(Exhausted))
	}
}

// Steady poison at 4 % is never refused: in every hundred deliveries up to
// four fail for good, anywhere among them, and the success counter is read at
// any moments up to a hundred deliveries apart.
func TestSteadyPoisonIsNeverRefused(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b, _ := New(dlq.BudgetConfig{}, 0)
		shapes := rapid.SliceOfN(rapid.SliceOfN(rapid.IntRange(0, 99), 4, 4), 1, 8).Draw(t, "places of the poison")
		reads := rapid.SliceOfN(rapid.IntRange(1, 100), 1, 8).Draw(t, "deliveries between reads")
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		var total uint64
		lowest, read, next := math.Inf(1), 0, reads[0]
		for block := range 1000 {
			var poison [100]bool
			for _, p := range shapes[rng.IntN(len(shapes))] {
				for poison[p] { // four different ones
					p = (p + 1) % 100
				}
				poison[p] = true
			}
			for i, bad := range poison {
				if !bad {
					total++
				} else if !b.Spend(time.Duration(block*100+i)*time.Microsecond, Exhausted) {
					t.Fatalf("refused at delivery %d", block*100+i)
				}
				lowest = min(lowest, b.Balance(Exhausted))
				if next--; next == 0 {
					b.Successes(total)
					read++
					next = reads[read%len(reads)]
				}
			}
		}
		if lowest < 8 {
			t.Fatalf("balance fell to %v, want 8 at least: two blocks back to back, then a read that is a block late", lowest)
		}
	})
}

// The same share at random, without a bound on how it clusters.
func TestRandomPoisonIsNotRefused(t *testing.T) {
	for seed := range uint64(5) {
		rng := rand.New(rand.NewPCG(seed, 4))
		b := newBudget(t, dlq.BudgetConfig{})
		var total uint64
		for i := range 1_000_000 {
			if rng.Float64() >= 0.04 {
				total++
			} else if !b.Spend(0, Exhausted) {
				t.Fatalf("seed %d: refused at delivery %d", seed, i)
			}
			if i%64 == 0 {
				b.Successes(total)
			}
		}
	}
}

// A budget refuses the settings that dlq.BudgetConfig refuses.
func TestNew(t *testing.T) {
	if b, err := New(dlq.BudgetConfig{FreeEvery: -1}, 0); err == nil || b != nil {
		t.Errorf("%v, %v", b, err)
	}
	if b, err := New(dlq.BudgetConfig{}, 0.1); err == nil || b != nil {
		t.Errorf("a storm rate that the defaults cannot carry: %v, %v", b, err)
	}
}

// What the law is for: a source that it admits, with poison just under the
// storm threshold, does not run out of credits; one that it refuses does.
func TestLawTellsWhoStalls(t *testing.T) {
	for _, tt := range []struct {
		earn, storm float64
		legal       bool
	}{{0.1, 0.05, true}, {0.06, 0.05, true}, {0.05, 0.05, false}, {0.1, 0.2, false}, {0.5, 0.2, true}} {
		c := dlq.BudgetConfig{Earn: tt.earn, PermanentEarn: 1}
		if err := c.Validate(tt.storm); (err == nil) != tt.legal {
			t.Errorf("%+v: %v", tt, err)
			continue
		}
		b := newBudgetUnchecked(c)
		var total uint64
		owed := 0.0
		for range 100_000 {
			if owed += tt.storm * 0.999; owed >= 1 {
				owed--
				b.Spend(0, Exhausted)
			} else {
				total++
			}
			b.Successes(total)
		}
		if stalls := b.Refused() > 0; stalls == tt.legal {
			t.Errorf("%+v: refused %d", tt, b.Refused())
		}
	}
}

// newBudgetUnchecked gives the budget that the law would refuse.
func newBudgetUnchecked(c dlq.BudgetConfig) *Budget {
	b, _ := New(dlq.BudgetConfig{PermanentEarn: 1}, 0)
	b.pools[Exhausted].earn = toCredits(c.Earn)
	return b
}

func TestClassString(t *testing.T) {
	for c, want := range map[Class]string{Exhausted: "exhausted", Permanent: "permanent", 7: "Class(7)"} {
		if got := c.String(); got != want {
			t.Errorf("%d: %q", c, got)
		}
	}
}

// book is the budget as a list of entries, in millionths of a credit, from
// which every balance is worked out anew.
type book struct {
	c       dlq.BudgetConfig
	entries []entry
}

type entry struct {
	kind  string // earn, gift, spend, free, refuse
	class Class
	n     int64 // successes earned, or millionths granted
	now   time.Duration
}

func (k *book) replay() (has [classes]int64, gift int64, free [classes]time.Duration) {
	const one = 1_000_000
	most := [classes]int64{int64(k.c.Balance * one), int64(k.c.PermanentBalance * one)}
	earn := [classes]int64{int64(math.Round(k.c.Earn * one)), int64(math.Round(k.c.PermanentEarn * one))}
	has = most
	for _, e := range k.entries {
		var could [classes]bool
		for c := range has {
			could[c] = has[c]+gift >= one
		}
		switch e.kind {
		case "earn":
			for range e.n { // one by one
				for c := range has {
					has[c] = min(has[c]+earn[c], most[c])
				}
			}
		case "gift":
			gift += e.n
		case "spend":
			has[e.class] -= one
			if has[e.class] < 0 {
				gift += has[e.class]
				has[e.class] = 0
			}
			for c := range has {
				if could[c] && has[c]+gift < one {
					free[c] = e.now + k.c.FreeEvery
				}
			}
		case "free":
			free[e.class] = e.now + k.c.FreeEvery
		}
	}
	return has, gift, free
}

// rounds checks a property twenty times as often as rapid's default: a fault may need a
// rare sequence.
func rounds(t *testing.T, property func(*rapid.T)) {
	t.Helper()
	n := 20
	if testing.Short() {
		n = 1
	}
	for i := range n {
		t.Run(strconv.Itoa(i), rapid.MakeCheck(property))
	}
}

func TestBudgetAgainstBook(t *testing.T) {
	rounds(t, func(t *rapid.T) {
		c := dlq.BudgetConfig{
			Earn:             rapid.SampledFrom([]float64{0.1, 0.3, 1, 0.070001}).Draw(t, "earn"),
			Balance:          float64(rapid.IntRange(2, 8).Draw(t, "half balance")) / 2,
			FreeEvery:        10 * time.Second,
			PermanentEarn:    0.5,
			PermanentBalance: 3,
		}
		b, err := New(c, 0)
		if err != nil {
			t.Fatal(err)
		}
		k := &book{c: c}
		var now time.Duration
		var total, ignored uint64
		var spends, sinceMint int // the latter: Exhausted, since the last success or gift
		var mintAt time.Duration
		had := c.Balance
		mint := func() { sinceMint, mintAt, had = 0, now, b.Balance(Exhausted) }
		t.Repeat(map[string]func(*rapid.T){
			"wait": func(t *rapid.T) {
				now += time.Duration(rapid.IntRange(0, 11).Draw(t, "s")) * time.Second
			},
			"earn": func(t *rapid.T) {
				n := rapid.Uint64Range(0, 15).Draw(t, "n")
				total += n
				b.Successes(total)
				k.entries = append(k.entries, entry{kind: "earn", n: int64(n)})
				mint()
			},
			"stale total": func(t *rapid.T) {
				if n := rapid.Uint64Range(0, total).Draw(t, "total"); n < total {
					ignored++
					b.Successes(n)
				}
			},
			"gift": func(t *rapid.T) {
				n := rapid.IntRange(0, 20).Draw(t, "tenths")
				b.Grant(float64(n) / 10)
				k.entries = append(k.entries, entry{kind: "gift", n: int64(n) * 100_000})
				mint()
			},
			"spend": func(t *rapid.T) {
				class := Class(rapid.IntRange(0, classes-1).Draw(t, "class"))
				has, gift, free := k.replay()
				e := entry{kind: "refuse", class: class, now: now}
				if has[class]+gift >= 1_000_000 {
					e.kind = "spend"
				} else if now >= free[class] {
					e.kind = "free"
				}
				at, wait := b.Next(now, class)
				if e.kind == "refuse" && (!wait || at != free[class]) || e.kind != "refuse" && (wait || at != now) {
					t.Fatalf("next: %v, %v, want %s at %v", at, wait, e.kind, free[class])
				}
				if got := b.Spend(now, class); got != (e.kind != "refuse") {
					t.Fatalf("spend %v: got %v, want %s", class, got, e.kind)
				}
				k.entries = append(k.entries, e)
				if e.kind != "refuse" {
					if spends++; class == Exhausted {
						sinceMint++
					}
				}
			},
			"": func(t *rapid.T) {
				has, gift, _ := k.replay()
				for class := range Class(classes) {
					if got, want := b.Balance(class), float64(has[class]+gift)/1e6; got != want {
						t.Fatalf("balance %v: got %v, want %v", class, got, want)
					}
				}
				if uint64(spends) != b.Spent() || ignored != b.Ignored() {
					t.Fatalf("spent %d, ignored %d; want %d, %d", b.Spent(), b.Ignored(), spends, ignored)
				}
				// Whatever came before: one free credit may have been due.
				if most := had + 1 + float64(now-mintAt)/float64(c.FreeEvery); float64(sinceMint) > most {
					t.Fatalf("%d spent without a success, want %v at most", sinceMint, most)
				}
			},
		})
	})
}

func TestBudgetAllocs(t *testing.T) {
	b := newBudget(t, dlq.BudgetConfig{})
	var now time.Duration
	if n := testing.AllocsPerRun(1000, func() {
		now += time.Second
		b.Successes(uint64(now / time.Second))
		b.Spend(now, Exhausted)
		b.Next(now, Exhausted)
		b.Grant(0.1)
		_ = b.Balance(Permanent)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkBudgetSuccesses(b *testing.B) {
	d := newBudget(b, dlq.BudgetConfig{})
	b.ReportAllocs()
	for i := range b.N {
		d.Successes(uint64(i))
	}
}

func BenchmarkBudgetSpend(b *testing.B) {
	d := newBudget(b, dlq.BudgetConfig{})
	b.ReportAllocs()
	for i := range b.N {
		d.Successes(uint64(i) * 10)
		d.Spend(0, Exhausted)
	}
}

func BenchmarkBudgetRefuse(b *testing.B) {
	d := newBudget(b, dlq.BudgetConfig{})
	drain(d, 0, Exhausted)
	b.ReportAllocs()
	for b.Loop() {
		d.Spend(time.Second, Exhausted)
	}
}

// A refund gives back what was spent, and never more than the balance holds.
func TestRefundMintsNothing(t *testing.T) {
	b, err := New(dlq.BudgetConfig{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		paid, ok := b.Pay(0, Exhausted)
		if !ok {
			t.Fatal("refused")
		}
		b.Refund(paid)
	}
	if got := b.Balance(Exhausted); got != 20 || b.Spent() != 0 {
		t.Errorf("balance %v, spent %d", got, b.Spent())
	}
	for range 25 {
		paid, _ := b.Pay(0, Exhausted)
		b.Successes(1000)
		b.Refund(paid)
	}
	if got := b.Balance(Exhausted); got > 20 {
		t.Errorf("balance %v", got)
	}
}

// What was granted is granted again, whole or in part, and nothing else is: not what
// was earned, free or never taken.
func TestRefundOfAGrant(t *testing.T) {
	b := newBudget(t, dlq.BudgetConfig{})
	drain(b, 0, Exhausted)
	b.Successes(4)
	b.Grant(100)
	var paid []Paid
	for range 50 {
		p, ok := b.Pay(0, Exhausted)
		if !ok {
			t.Fatal("refused")
		}
		paid = append(paid, p)
	}
	for _, p := range paid {
		b.Refund(p)
	}
	if got := b.Balance(Exhausted); got != 100.4 {
		t.Errorf("balance %v after all went back", got)
	}
	if got := b.Balance(Permanent); got != 600 {
		t.Errorf("permanent %v: what was granted is for either", got)
	}

	b.Refund(Paid{})
	spent := b.Spent()
	p, _ := b.Pay(0, Exhausted) // 0.4 its own
	b.Successes(1004)           // full again
	b.Refund(p)
	if got := b.Balance(Exhausted); got != 120 || b.Spent() != spent {
		t.Errorf("balance %v, spent %d", got, b.Spent())
	}

	b = newBudget(t, dlq.BudgetConfig{Balance: 1})
	b.Spend(0, Exhausted)
	p, ok := b.Pay(time.Hour, Exhausted) // free
	b.Successes(10)
	if b.Refund(p); !ok || b.Balance(Exhausted) != 1 {
		t.Errorf("%v, balance %v", ok, b.Balance(Exhausted))
	}
}
