// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
)

// ranges collects flags whose values have a range. check reports all errors of a
// command line at once; pflag alone stops at the first.
type ranges []*ranged

// ranged is a [pflag.Value] that keeps a bad value for check, and returns no error.
type ranged struct {
	name, kind, raw, must string
	set                   func(string) bool // false: unreadable or out of range
	bad                   bool
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
			errs = append(errs, fmt.Errorf("--%s %q: must be %s", r.name, r.raw, r.must))
		}
	}
	return errors.Join(errs...)
}

func (rs *ranges) duration(flags *pflag.FlagSet, p *time.Duration, name string, low, high time.Duration, usage string) {
	rs.add(flags, fmt.Sprintf("%s, %s to %s", usage, low, high), &ranged{
		name: name, kind: "duration", raw: p.String(), must: fmt.Sprintf("a duration from %s to %s", low, high),
		set: func(raw string) (ok bool) {
			d, err := time.ParseDuration(raw)
			if ok = err == nil && d >= low && d <= high; ok {
				*p = d
			}
			return ok
		},
	})
}

// durations adds a flag for a list with commas. p stays unset without the flag.
func (rs *ranges) durations(flags *pflag.FlagSet, p *[]time.Duration, name, usage string) {
	rs.add(flags, usage, &ranged{
		name: name, kind: "durations", must: "durations with commas, such as 1m,10m",
		set: func(raw string) bool {
			*p = nil
			for text := range strings.SplitSeq(raw, ",") {
				d, err := time.ParseDuration(strings.TrimSpace(text))
				if err != nil {
					return false
				}
				*p = append(*p, d)
			}
			return true
		},
	})
}

func (rs *ranges) number(flags *pflag.FlagSet, p *int, name string, low, high int, usage string) {
	rs.add(flags, fmt.Sprintf("%s, %d to %d", usage, low, high), &ranged{
		name: name, kind: "number", raw: strconv.Itoa(*p), must: fmt.Sprintf("a number from %d to %d", low, high),
		set: func(raw string) (ok bool) {
			n, err := strconv.Atoi(raw)
			if ok = err == nil && n >= low && n <= high; ok {
				*p = n
			}
			return ok
		},
	})
}

// choice adds a flag whose value is one of the words in all.
func choice[T ~string](rs *ranges, flags *pflag.FlagSet, p *T, name string, all []T, usage string) {
	words := make([]string, len(all))
	for i, w := range all {
		words[i] = string(w)
	}
	list := strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
	rs.add(flags, usage+": "+list, &ranged{
		name: name, kind: "name", raw: string(*p), must: list,
		set: func(raw string) (ok bool) {
			if ok = slices.Contains(all, T(raw)); ok {
				*p = T(raw)
			}
			return ok
		},
	})
}

func (rs *ranges) add(flags *pflag.FlagSet, usage string, r *ranged) {
	*rs = append(*rs, r)
	flags.Var(r, r.name, usage)
}

// accessFlags adds the flags for TLS and a user, which are the same for all brokers.
// Their names begin with c.Prefix. tls is the help of --tls; if it is empty there is no
// such flag, and --url selects TLS. sasl adds --sasl, which only Kafka has.
func accessFlags(rs *ranges, flags *pflag.FlagSet, c *access.Config, tls string, sasl bool) {
	if tls != "" {
		flags.BoolVar(&c.TLS, c.Prefix+"tls", false, tls)
	}
	flags.StringVar(&c.CA, c.Prefix+"ca", "", "PEM `file` of the certificates to trust (default: the system's)")
	flags.StringVar(&c.Cert, c.Prefix+"cert", "", "PEM `file` of a client certificate, with --"+c.Prefix+"key")
	flags.StringVar(&c.Key, c.Prefix+"key", "", "PEM `file` of its private key")
	flags.StringVar(&c.User, c.Prefix+"user", "", "`name` to log in with, with --"+c.Prefix+"password-file")
	flags.StringVar(&c.PasswordFile, c.Prefix+"password-file", "", "`file` with the password, such as /dev/stdin")
	if sasl {
		choice(rs, flags, &c.SASL, c.Prefix+"sasl", access.Mechanisms(), "how Kafka is told the password, with --"+c.Prefix+"user")
	}
}
