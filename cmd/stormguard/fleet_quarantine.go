// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/words"
	"github.com/stormguard-mq/stormguard/dlq"
	"github.com/stormguard-mq/stormguard/fleet"
)

// quarantineFlags are the flags that describe a rule.
type quarantineFlags struct{ key, header, cause string }

func (q *quarantineFlags) bind(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&q.key, "key", "", "messages of this `key`")
	f.StringVar(&q.header, "header", "", "messages with this header, `NAME=VALUE`, such as tenant=acme")
	f.StringVar(&q.cause, "cause", "", "messages that fail with this cause, its `ID` as in logs and dead letters; an error of the dependency never matches")
}

// rule returns the rule of the flags. Exactly one flag must be given.
func (q *quarantineFlags) rule(cmd *cobra.Command) (rule dlq.Rule, err error) {
	given := 0
	for _, name := range []string{"key", "header", "cause"} {
		if cmd.Flags().Changed(name) {
			given++
		}
	}
	if given != 1 {
		return rule, usageError{errors.New("--key, --header, --cause: give one of them")}
	}
	switch {
	case cmd.Flags().Changed("key"):
		rule = dlq.Rule{Kind: dlq.RuleKey, Value: q.key}
	case cmd.Flags().Changed("cause"):
		rule = dlq.Rule{Kind: dlq.RuleCause, Value: q.cause}
	default:
		name, value, ok := strings.Cut(q.header, "=")
		if !ok {
			return rule, usageError{fmt.Errorf("--header %q: is not NAME=VALUE", q.header)}
		}
		rule = dlq.Rule{Kind: dlq.RuleHeader, Header: name, Value: value}
	}
	if err := rule.Validate(); err != nil {
		return rule, usageError{err}
	}
	return rule, nil
}

const quarantineLong = `Keep messages apart that break the handlers, in all processes of the fleet: those of
a key, of a header's value such as a tenant, or of a cause of failure. They are
dead-lettered unhandled, with the reason "quarantine"; everything else is handled.
Without a fleet the list is that of the process that is asked, and of no other.`

// newFleetQuarantine makes the command quarantine. asking are its subcommands that send requests
// to a process.
func newFleetQuarantine(op *operator) (cmd *cobra.Command, asking []*cobra.Command) {
	cmd = &cobra.Command{
		Use:   "quarantine",
		Short: "Keep a key's, a tenant's or a cause's messages from all handlers",
		Long:  quarantineLong,
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	asking = []*cobra.Command{newQuarantineAdd(op), newQuarantineRemove(op), newQuarantineList(op)}
	cmd.AddCommand(asking...)
	return cmd, asking
}

func newQuarantineAdd(op *operator) *cobra.Command {
	var flags quarantineFlags
	var in fleet.QuarantineRequest
	cmd := &cobra.Command{
		Use:   "add (--key K | --header NAME=VALUE | --cause ID)",
		Short: "Put a rule on the list, in force within a second",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			rule, err := flags.rule(cmd)
			if err != nil {
				return err
			}
			if in.For <= 0 || in.For > dlq.MaxQuarantineFor {
				return usageError{fmt.Errorf("--for %v: is not in (0, %v]", in.For, dlq.MaxQuarantineFor)}
			}
			in.Rule = rule.String()
			return op.quarantine(cmd, in, "in quarantine: %s")
		},
	}
	flags.bind(cmd)
	cmd.Flags().DurationVar(&in.For, "for", 24*time.Hour, "it ends by itself after that, at most 168h")
	cmd.Flags().StringVar(&in.Why, "why", "", "for who reads the list, up to 128 bytes")
	cmd.Flags().StringVar(&in.By, "by", cmp.Or(os.Getenv("USER"), os.Getenv("USERNAME")), "who you are; a token's name counts before it")
	return cmd
}

func newQuarantineRemove(op *operator) *cobra.Command {
	var flags quarantineFlags
	in := fleet.QuarantineRequest{Remove: true}
	cmd := &cobra.Command{
		Use:   "remove (--key K | --header NAME=VALUE | --cause ID)",
		Short: "Take a rule off the list",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			rule, err := flags.rule(cmd)
			if err != nil {
				return err
			}
			in.Rule = rule.String()
			var all []fleet.Quarantined
			if _, err := op.ask(cmd.Context(), http.MethodGet, op.rules, nil, &all); err != nil {
				return err
			}
			if !slices.ContainsFunc(all, func(q fleet.Quarantined) bool { return q.Rule == in.Rule }) {
				return fmt.Errorf("%s is not in quarantine: quarantine list prints what is", in.Rule)
			}
			return op.quarantine(cmd, in, "no longer in quarantine: %s")
		},
	}
	flags.bind(cmd)
	cmd.Flags().StringVar(&in.By, "by", cmp.Or(os.Getenv("USER"), os.Getenv("USERNAME")), "who you are; a token's name counts before it")
	return cmd
}

func newQuarantineList(op *operator) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "Print the rules that are in force, oldest first",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var all []fleet.Quarantined
			raw, err := op.ask(cmd.Context(), http.MethodGet, op.rules, nil, &all)
			if err != nil {
				return err
			}
			return op.print(cmd, raw, func(w io.Writer, l words.Language) error {
				return table(w, l, "RULE\tBY\tSINCE\tUNTIL\tWHY", func(row func(...any)) {
					for _, q := range all {
						row(q.Rule, q.By, q.At.Format(time.RFC3339), q.Until.Format(time.RFC3339), q.Why)
					}
				})
			})
		},
	}
}

// quarantine requests a change of the list of rules.
func (op *operator) quarantine(cmd *cobra.Command, in fleet.QuarantineRequest, done string) error {
	var all []fleet.Quarantined
	raw, err := op.ask(cmd.Context(), http.MethodPost, op.rules, in, &all)
	if refused, ok := errors.AsType[refusedError](err); ok && refused.status == http.StatusBadGateway {
		return partialError{err} // the change was made, but not by all processes
	}
	if err != nil {
		return err
	}
	return op.print(cmd, raw, func(w io.Writer, l words.Language) error {
		_, err := io.WriteString(w, l.Sayf("%s; %s\n", l.Sayf(done, in.Rule), l.Count(len(all), "rule")))
		return err
	})
}
