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

// A Mutant is a consumer with a bug on purpose. It shows that a check of the report finds the bug.
type Mutant string

// The mutants, each with the figure of the report that shows it.
const (
	AckFirst     Mutant = "ack-first"     // acks before the effect: lost
	Swallow      Mutant = "swallow"       // acks failed messages: lost
	EarlyLetter  Mutant = "early-letter"  // confirms a dead letter before the write: lost
	DropPoison   Mutant = "drop-poison"   // acks poison: lost
	LoseSpill    Mutant = "lose-spill"    // begins with an empty spill: lost
	NoOnce       Mutant = "no-once"       // uses no marks: duplicate_effects
	LostSync     Mutant = "lost-sync"     // its marks die with the process: duplicate_effects
	OwnMarks     Mutant = "own-marks"     // several consumers do not share their marks: duplicate_effects
	BuryAll      Mutant = "bury-all"      // takes an outage for a permanent error: healthy_dead_letters
	ChargePoison Mutant = "charge-poison" // makes the effect of poison, too: poison_effects
	Unordered    Mutant = "unordered"     // four workers, and every second message takes longer: out_of_order
	StopsShort   Mutant = "stops-short"   // handles nothing after a hundred messages: drained
	Slow         Mutant = "slow"          // takes 400 ms for one message in twenty: p99_ms of a schedule with gates
	Flaky        Mutant = "flaky"         // fails once with one message in fifty: error_percent of a schedule with gates
	Idle         Mutant = "idle"          // does nothing if it is not the first consumer: longest_ms of a schedule with gates
)

// Mutants returns all mutants.
func Mutants() []Mutant {
	return []Mutant{AckFirst, Swallow, EarlyLetter, DropPoison, LoseSpill, NoOnce, LostSync, OwnMarks, BuryAll, ChargePoison, Unordered, StopsShort, Slow, Flaky, Idle}
}

// early is the time from the confirmation of a letter to its write.
const early = time.Second

// prepare changes the job and the guard's configuration for the mutant.
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

// writer changes the dead-letter writer for the mutant.
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
