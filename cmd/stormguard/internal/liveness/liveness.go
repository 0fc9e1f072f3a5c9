// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

// Package liveness runs the guard that ships through a table of loads, poison and outages,
// on virtual time and an in-memory broker. It judges whether the guard makes progress.
package liveness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

// Config says what to run.
type Config struct {
	Seed  uint64 // for all random draws
	Seeds int    // number of random seeds that replace Seed; 0 uses Seed
	Only  string // a regular expression for the names of rows; empty selects all
	All   bool   // runs more outages, each order, thousands of hours
	JSON  bool   // prints JSON, not a table
}

// ErrUsage means that a Config is wrong: a bad regular expression, or no row selected.
var ErrUsage = errors.New("simulate liveness")

// ErrFailed means that a row misses its limit.
var ErrFailed = errors.New("a row misses its limit")

// Run runs the rows that cfg selects, and prints them. The error is [ErrFailed] if a row
// misses its limit; its text names these rows. If ctx ends, Run returns soon, with the
// error of ctx and without a table.
func Run(ctx context.Context, cfg Config, stdout, stderr io.Writer) error {
	chosen, err := cfg.choose()
	if err != nil {
		return err
	}
	seeds := []uint64{cfg.Seed}
	if cfg.Seeds > 0 {
		seeds = make([]uint64, cfg.Seeds)
		for i := range seeds {
			seeds[i] = uint64(rand.Int32())
		}
	}
	rows := runAll(ctx, chosen, seeds, stderr)
	if err := ctx.Err(); err != nil {
		return err
	}
	if cfg.JSON {
		err = json.NewEncoder(stdout).Encode(struct {
			Rows []Row `json:"rows"`
		}{rows})
	} else {
		err = table(stdout, rows)
	}
	var failed []string
	for _, r := range rows {
		if len(r.Missed) > 0 {
			failed = append(failed, r.Name)
		}
	}
	if len(failed) > 0 {
		err = errors.Join(err, fmt.Errorf("%w: %d of %d: %s", ErrFailed, len(failed), len(rows), strings.Join(failed, ", ")))
	}
	return err
}

func (c Config) choose() (chosen []spec, err error) {
	only, err := regexp.Compile(c.Only)
	if err != nil {
		return nil, fmt.Errorf("%w: --only: %w", ErrUsage, err)
	}
	for _, s := range specs(c.All) {
		if (c.All || !s.long || c.Only != "") && only.MatchString(s.name) {
			chosen = append(chosen, s)
		}
	}
	if len(chosen) == 0 {
		return nil, fmt.Errorf("%w: no row's name matches %q", ErrUsage, c.Only)
	}
	return chosen, nil
}

// runAll runs the rows with each seed, on all processors.
func runAll(ctx context.Context, chosen []spec, seeds []uint64, stderr io.Writer) []Row {
	rows := make([]Row, 0, len(chosen)*len(seeds))
	specOf := make([]spec, 0, cap(rows))
	for _, seed := range seeds {
		for _, s := range chosen {
			rows = append(rows, Row{Name: s.name, Order: s.order, Class: string(s.class), Seed: seed})
			specOf = append(specOf, s)
		}
	}
	type job struct{ row, part int }
	jobs := make(chan job)
	var mu sync.Mutex // guards rows and the variables below
	parts := make([]map[int]*trial, len(rows))
	taken := make([]int, len(rows)) // number of parts in the row
	outages, overtaken := make([]int, len(rows)), make([]int, len(rows))
	finish := func(j job, t *trial, took time.Duration) {
		mu.Lock()
		defer mu.Unlock()
		r := &rows[j.row]
		r.Took += took.Seconds()
		if parts[j.row] == nil {
			parts[j.row] = make(map[int]*trial)
		}
		parts[j.row][j.part] = t
		for t := parts[j.row][taken[j.row]]; t != nil; t = parts[j.row][taken[j.row]] {
			delete(parts[j.row], taken[j.row])
			taken[j.row]++
			r.take(t)
			outages[j.row] += t.outages
			overtaken[j.row] += t.overtaken
			r.OvertakenLimit = t.OvertakenLimit
		}
		if taken[j.row] == specOf[j.row].parts && ctx.Err() == nil {
			r.finish(outages[j.row], overtaken[j.row])
			fmt.Fprintf(stderr, "%-36s %6.1f s  %s\n", r.Name, r.Took, r.verdict())
		}
	}
	var runners sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		runners.Go(func() {
			for j := range jobs {
				began := time.Now()
				t := runPart(ctx, specOf[j.row], rows[j.row].Seed, j.part)
				finish(j, t, time.Since(began))
			}
		})
	}
	for row := range rows {
		for part := range specOf[row].parts {
			select {
			case jobs <- job{row, part}:
				continue
			case <-ctx.Done():
			}
			break
		}
	}
	close(jobs)
	runners.Wait()
	return rows
}

// runPart runs one part of a row, in a bubble of its own.
func runPart(ctx context.Context, s spec, seed uint64, part int) *trial {
	t := &trial{ctx: ctx, seed: seedOf(seed, s.name, part), index: part}
	var err error
	if bubble := virtual(func() { err = s.do(t) }); bubble != nil {
		err = errors.Join(err, bubble)
	}
	if err != nil {
		t.missf("%v", err)
	}
	return t
}

// finish judges the figures that need all runs of a row.
func (r *Row) finish(outages, overtaken int) {
	if outages == 0 {
		return
	}
	r.Overtaken = number(100 * float64(overtaken) / float64(outages))
	if r.OvertakenLimit != nil && *r.Overtaken > *r.OvertakenLimit {
		r.Missed = append(r.Missed, fmt.Sprintf("a message was overtaken in %.1f %% of the outages, the limit is %.1f %%", *r.Overtaken, *r.OvertakenLimit))
	}
}

func (r *Row) verdict() string {
	if len(r.Missed) == 0 {
		return "ok"
	}
	return "MISSED: " + strings.Join(r.Missed, "; ")
}

func table(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "row\tpoison\thandled %\tof\tletters\tof\tpassed s\tof\tdrained s\tof\tcalls %\tof\tovertaken %\tof\tseed\t\t")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t\n",
			r.Name, r.Poison, cell(r.Handled), cell(r.HandledLimit), r.Letters, r.LettersLimit, cell(r.Passed), cell(r.PassedLimit),
			cell(r.Drained), cell(r.DrainedLimit), cell(r.Calls), cell(r.CallsLimit), cell(r.Overtaken), cell(r.OvertakenLimit), r.Seed, mark(r))
	}
	return t.Flush()
}

func cell(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f", *v)
}

func mark(r Row) string {
	if len(r.Missed) > 0 {
		return "MISSED"
	}
	return "ok"
}
