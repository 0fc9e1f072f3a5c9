// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package dlq

import (
	"errors"
	"fmt"
	"time"
)

// Defaults of a [BudgetConfig] field left at zero.
const (
	defaultEarn             = 0.1
	defaultBalance          = 20
	defaultFreeEvery        = 5 * time.Minute
	defaultPermanentEarn    = 0.5
	defaultPermanentBalance = 500
)

// BudgetConfig says what dead-lettering costs. Each dead letter costs one credit of
// its class, and only successes earn credits. A permanent dead letter is shown to be
// poison: its handler or its error called it hopeless, or it failed where others
// succeeded. An exhausted one has used up its attempts and nothing else is known, as
// every delivery in an outage, so its balance is small.
//
// The zero value is valid and means the documented defaults: once nothing succeeds any
// more, at most 20 exhausted dead letters, and 12 an hour after that; and 500 permanent
// ones.
type BudgetConfig struct {
	// Earn is what one success earns for exhausted dead letters, in credits. In
	// [0.000001, 1], taken to the nearest millionth; default 0.1.
	//
	// With p of all deliveries failing for good, a source earns Earn*(1-p) and
	// spends p a delivery: below p = Earn/(1+Earn), 9 % by default, it never runs
	// out. For permanent ones that is a third of all deliveries.
	Earn float64

	// Balance is the most that successes can save up for exhausted ones, and what
	// a source starts with. In [1, 1000000], taken to the nearest millionth;
	// default 20. It is what an outage can spend, however busy the source was.
	Balance float64

	// FreeEvery is the time after which a class that is spent gets one credit
	// though nothing succeeded, and again for as long as it stays spent. In
	// [1s, 8760h]; default 5m. It is not saved up: an hour without a
	// dead letter leaves one free credit, not twelve.
	FreeEvery time.Duration

	// PermanentEarn is Earn for permanent dead letters; default 0.5.
	PermanentEarn float64

	// PermanentBalance is Balance for permanent dead letters; default 500.
	PermanentBalance float64

	// Off makes a budget that refuses nothing and still counts. The other
	// fields are still checked.
	Off bool
}

// Validate reports every field out of its range, and every breach of one law:
// what successes earn while stormRate of the deliveries fail must exceed what
// dead-lettering those costs. Otherwise a source with a little less poison than
// that would run out of credits and wait, and no storm would say why.
//
// stormRate is the [StormConfig] field ErrorRate; zero means its default.
func (c BudgetConfig) Validate(stormRate float64) error {
	d := c.WithDefaults()
	var errs []error
	check := func(ok bool, field string, value any, want string) {
		if !ok {
			errs = append(errs, fmt.Errorf("dlq: budget config: %s is %v: must be %s", field, value, want))
		}
	}
	if stormRate == 0 {
		stormRate = defaultErrorRate
	}
	rateOK := stormRate > 0 && stormRate < 1
	check(rateOK, "storm rate", stormRate, "in (0, 1)")
	earn := func(field string, set, v float64) {
		inRange := 1e-6 <= v && v <= 1
		check(inRange, field, set, "in [0.000001, 1]")
		if inRange && rateOK && !(v*(1-stormRate) > stormRate) {
			errs = append(errs, fmt.Errorf("dlq: budget config: %s is %v: with %v of the deliveries failing, the storm threshold, "+
				"successes earn %.6g credits a delivery and dead letters cost %v: must be above %.6g",
				field, v, stormRate, v*(1-stormRate), stormRate, stormRate/(1-stormRate)))
		}
	}
	earn("Earn", c.Earn, d.Earn)
	check(1 <= d.Balance && d.Balance <= 1e6, "Balance", c.Balance, "in [1, 1000000]")
	check(time.Second <= d.FreeEvery && d.FreeEvery <= 8760*time.Hour, "FreeEvery", c.FreeEvery, "in [1s, 8760h]")
	earn("PermanentEarn", c.PermanentEarn, d.PermanentEarn)
	check(1 <= d.PermanentBalance && d.PermanentBalance <= 1e6, "PermanentBalance", c.PermanentBalance, "in [1, 1000000]")
	return errors.Join(errs...)
}

// WithDefaults returns c with every unset field replaced by its default.
func (c BudgetConfig) WithDefaults() BudgetConfig {
	if c.Earn == 0 {
		c.Earn = defaultEarn
	}
	if c.Balance == 0 {
		c.Balance = defaultBalance
	}
	if c.FreeEvery == 0 {
		c.FreeEvery = defaultFreeEvery
	}
	if c.PermanentEarn == 0 {
		c.PermanentEarn = defaultPermanentEarn
	}
	if c.PermanentBalance == 0 {
		c.PermanentBalance = defaultPermanentBalance
	}
	return c
}
