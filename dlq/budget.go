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

// BudgetConfig limits the number of dead letters. Each dead letter costs one credit of its
// class, and successes earn credits. There are two classes:
//
//   - A permanent dead letter is proven poison: its handler or its error called it
//     hopeless, or it failed where others succeeded.
//   - An exhausted dead letter has used up its attempts, without proof. In an outage every
//     delivery looks like this, so the balance of this class is small.
//
// The zero value is valid and means the defaults below. With them, once nothing succeeds
// any more, a source can write at most 20 exhausted and 500 permanent dead letters. After
// that, each class gets 12 an hour.
type BudgetConfig struct {
	// Earn is the number of credits that one success earns for exhausted dead letters. In
	// [0.000001, 1], rounded to the nearest millionth; default 0.1.
	//
	// If a share p of all deliveries fails for good, a source earns Earn*(1-p) and spends p
	// per delivery. Below p = Earn/(1+Earn), 9 % by default, it never runs out of credits.
	// For permanent dead letters the default limit is a third of all deliveries.
	Earn float64

	// Balance is the largest number of saved credits for exhausted dead letters, and the
	// number at the start of a source. In [1, 1000000], rounded to the nearest millionth;
	// default 20. An outage can spend this many, however busy the source was.
	Balance float64

	// FreeEvery is the interval at which a class without credits gets a free one, although
	// nothing succeeded. In [1s, 8760h]; default 5m. Free credits are not saved up: after
	// an hour without a dead letter there is one, not twelve.
	FreeEvery time.Duration

	// PermanentEarn is Earn for permanent dead letters; default 0.5.
	PermanentEarn float64

	// PermanentBalance is Balance for permanent dead letters; default 500.
	PermanentBalance float64

	// Off makes a budget that counts but refuses nothing. The other fields are still
	// checked.
	Off bool
}

// Validate reports every field out of its range. It also checks that successes earn more
// than dead letters cost while stormRate of the deliveries fail. Otherwise a source with a
// little less poison than that would run out of credits and wait, and no storm would show
// the reason.
//
// stormRate is the field ErrorRate of [StormConfig]; zero means its default.
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
