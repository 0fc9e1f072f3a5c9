// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/pflag"
)

// ranges collects flags whose values must lie between two bounds, so that all
// that is wrong with a command line is said at once; pflag stops at the first.
type ranges []*ranged

// ranged is a [pflag.Value] that keeps what it cannot read for check.
type ranged struct {
	name, kind, raw, low, high string
	set                        func(string) bool // false: unreadable or out of range
	bad                        bool
}

func (r *ranged) String() string { return r.raw }
func (r *ranged) Type() string   { return r.kind }

func (r *ranged) Set(raw string) error {
	r.raw, r.bad = raw, !r.set(raw)
	return nil
}

// check reports every flag that is out of its range.
func (rs *ranges) check() error {
	var errs []error
	for _, r := range *rs {
		if r.bad {
			errs = append(errs, fmt.Errorf("--%s %q: must be a %s from %s to %s", r.name, r.raw, r.kind, r.low, r.high))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return usageError{errors.Join(errs...)}
}

func (rs *ranges) duration(flags *pflag.FlagSet, p *time.Duration, name string, low, high time.Duration, usage string) {
	rs.add(flags, usage, &ranged{
		name: name, kind: "duration", raw: p.String(), low: low.String(), high: high.String(),
		set: func(raw string) (ok bool) {
			d, err := time.ParseDuration(raw)
			if ok = err == nil && d >= low && d <= high; ok {
				*p = d
			}
			return ok
		},
	})
}

func (rs *ranges) number(flags *pflag.FlagSet, p *int, name string, low, high int, usage string) {
	rs.add(flags, usage, &ranged{
		name: name, kind: "number", raw: strconv.Itoa(*p), low: strconv.Itoa(low), high: strconv.Itoa(high),
		set: func(raw string) (ok bool) {
			n, err := strconv.Atoi(raw)
			if ok = err == nil && n >= low && n <= high; ok {
				*p = n
			}
			return ok
		},
	})
}

func (rs *ranges) add(flags *pflag.FlagSet, usage string, r *ranged) {
	*rs = append(*rs, r)
	flags.Var(r, r.name, fmt.Sprintf("%s, %s to %s", usage, r.low, r.high))
}
