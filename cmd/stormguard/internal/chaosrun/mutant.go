// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package chaosrun

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/guard"
)

// A Mutant is a consumer that is wrong on purpose, so that an oracle is seen to find it.
type Mutant string

// The mutants, and the figure of the report that shows each.
const (
	AckFirst     Mutant = "ack-first"     // acks before the effect: lost
	Swallow      Mutant = "swallow"       // acks what failed: lost
	EarlyLetter  Mutant = "early-letter"  // calls a dead letter confirmed before it is written: lost
	DropPoison   Mutant = "drop-poison"   // acks poison: lost
	LoseSpill    Mutant = "lose-spill"    // begins with an empty spill: lost
	NoOnce       Mutant = "no-once"       // has no marks: duplicate_effects
	LostSync     Mutant = "lost-sync"     // its marks die with the process: duplicate_effects
	OwnMarks     Mutant = "own-marks"     // each of several consumers has marks of its own: duplicate_effects
	BuryAll      Mutant = "bury-all"      // takes an outage for a permanent error: healthy_dead_letters
	ChargePoison Mutant = "charge-poison" // has the effect of poison, too: poison_effects
	Unordered    Mutant = "unordered"     // four workers, and every second message takes longer: out_of_order
	StopsShort   Mutant = "stops-short"   // handles nothing after a hundred messages: drained
	Slow         Mutant = "slow"          // takes 400 ms for one message in twenty: p99_ms of a schedule with gates
	Flaky        Mutant = "flaky"         // fails once with one message in fifty: error_percent of one
	Idle         Mutant = "idle"          // does nothing if it is not the first consumer: longest_ms of one
)

// Mutants are all of them.
func Mutants() []Mutant {
	return []Mutant{AckFirst, Swallow, EarlyLetter, DropPoison, LoseSpill, NoOnce, LostSync, OwnMarks, BuryAll, ChargePoison, Unordered, StopsShort, Slow, Flaky, Idle}
}

// early is how long before its write a letter is called confirmed.
const early = time.Second

// prepare changes what a job begins with.
func (m Mutant) prepare(j *Job, cfg *guard.Config) error {
	switch m {
	case Unordered:
		cfg.Policy.Order, cfg.Policy.Workers = guard.OrderNone, 4
	case OwnMarks:
		j.Marks, j.Consumers = fmt.Sprint(j.Own, j.Consumer), 1
	case LostSync:
		j.Marks, j.Consumers = fmt.Sprint(j.Own, "process-", j.Process), 1
	case LoseSpill:
		if j.Spill == "" {
			return errors.New("chaos: mutant lose-spill: needs --spill")
		}
		return os.RemoveAll(j.Spill)
	default:
	}
	return nil
}

// writer changes what dead letters are written by.
func (m Mutant) writer(w dlq.Writer) dlq.Writer {
	if m != EarlyLetter {
		return w
	}
	return dlq.WriterFunc(func(ctx context.Context, r *dlq.Record) error {
		late := context.WithoutCancel(ctx)
		time.AfterFunc(early, func() { _ = w.Write(late, r) })
		return nil
	})
}
