// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package credit

import (
	"encoding/json"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stormguard-mq/stormguard/dlq"
)

// A budget that is handed over at any instant, any number of times, grants what one
// budget would have granted.
func TestSaveMintsNothing(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		cfg := dlq.BudgetConfig{}
		one, err := New(cfg, 0)
		if err != nil {
			r.Fatal(err)
		}
		now := time.Duration(0)
		many := one.Continue()
		var total, base uint64
		for range rapid.IntRange(1, 200).Draw(r, "steps") {
			step := time.Duration(rapid.IntRange(0, 100).Draw(r, "s")) * time.Second
			now += step
			switch class := Class(rapid.IntRange(0, 1).Draw(r, "class")); rapid.IntRange(0, 9).Draw(r, "what") {
			case 0:
				total += uint64(rapid.IntRange(0, 50).Draw(r, "ok"))
				one.Successes(total)
				many.Successes(total - base)
			case 1:
				n := float64(rapid.IntRange(1, 5).Draw(r, "n"))
				one.Grant(n)
				many.Grant(n)
			case 2: // a restart
				s, ok := many.Save()
				text, err := json.Marshal(s)
				if err != nil {
					r.Fatal(err)
				}
				var read Saved
				if err := json.Unmarshal(text, &read); err != nil || read != s {
					r.Fatalf("%+v came back as %+v, %v", s, read, err)
				}
				if many, err = New(cfg, 0); err != nil {
					r.Fatal(err)
				}
				base = total
				if ok {
					many.Restore(now, read)
				}
			default:
				for range rapid.IntRange(1, 30).Draw(r, "spend") {
					if a, b := one.Spend(now, class), many.Spend(now, class); a != b {
						r.Fatalf("%v at %v: one budget says %v, the one handed over %v", class, now, a, b)
					}
				}
			}
		}
	})
}

// What a file says cannot mint: balances are cut at their maximum, and a free credit
// comes within FreeEvery.
func TestRestoreIsBounded(t *testing.T) {
	b := newBudget(t, dlq.BudgetConfig{})
	b.Restore(0, Saved{Has: [classes]uint64{1 << 63, 1 << 63}, Free: [classes]time.Duration{1 << 62, -5}, Gift: 1 << 63})
	if n := b.Balance(Exhausted); n != 20+mostGift {
		t.Errorf("the balance is %v", n)
	}
	b.Restore(0, Saved{Free: [classes]time.Duration{1 << 62, -5}})
	if at, wait := b.Next(0, Exhausted); !wait || at != (dlq.BudgetConfig{}).WithDefaults().FreeEvery {
		t.Errorf("the next free credit comes at %v, %v", at, wait)
	}
	if !b.Spend(0, Permanent) || b.Spend(0, Permanent) {
		t.Error("a free credit that is due is not one")
	}
	if _, ok := newBudget(t, dlq.BudgetConfig{Off: true}).Save(); ok {
		t.Error("a budget that is off leaves something")
	}
}
