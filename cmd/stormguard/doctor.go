// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/access"
	"github.com/stormguard-mq/stormguard/guard"
)

const doctorLong = `Look at the settings of a broker. Find those that would lose, repeat or delay
the messages of a guarded consumer, and say how to mend each. The doctor only
reads: it changes nothing.

Each finding has a severity:

  danger   messages can be lost
  warning  messages can be repeated or delayed, or the consumer can stop
  notice   good to know

The findings go to stdout: two lines each, or with --json one array of objects
{"severity","where","what","fix"}.

The exit status is for scripts:

  0  nothing was found, or only notices
  1  at least one danger or warning was found; --fail-on danger ignores warnings,
     --fail-on notice counts notices too
  2  the command line is wrong
  3  the doctor could not look, or not at everything: the broker did not answer,
     or refused. Findings that were made are printed all the same

--url says where to look. --ca, --cert, --key, --tls, --user and --password-file
say how to get in. They mean the same here and in "stormguard demo".`

// errFound makes the exit status 1; the findings say the rest.
var errFound = errors.New("the settings need work: see the findings above")

// lookError makes the exit status 3: nobody knows what would have been found.
type lookError struct{ error }

func (e lookError) Unwrap() error { return e.error }

func newDoctor() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find settings of a broker that would lose messages",
		Long:  doctorLong,
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newDoctorKafka(), newDoctorNATS(), newDoctorRabbitMQ())
	return cmd
}

// examination is what the doctor's commands share.
type examination struct {
	ranges
	url    string
	hold   time.Duration
	failOn severity
	json   bool
	access access.Config
}

// severity is a [guard.Severity] as a flag.
type severity string

func severities() []severity { return []severity{"notice", "warning", "danger"} }

func (e *examination) flags(cmd *cobra.Command) {
	e.hold, e.failOn = time.Hour, "warning"
	e.duration(cmd.Flags(), &e.hold, "hold", time.Second, 8760*time.Hour, "the longest outage that must lose no message")
	choice(&e.ranges, cmd.Flags(), &e.failOn, "fail-on", severities(), "the least severity that makes the exit status 1")
	cmd.Flags().BoolVar(&e.json, "json", false, "print one JSON array")
}

// need reports which of the flags are unset or out of range.
func (e *examination) need(cmd *cobra.Command, names ...string) error {
	err := e.check()
	for _, name := range names {
		if cmd.Flag(name).Value.String() == "" {
			err = errors.Join(err, fmt.Errorf("--%s: must be given", name))
		}
	}
	return err
}

// form reports a --url of another form.
func (e *examination) form(ok bool, form string) error {
	if ok || e.url == "" { // need says the latter
		return nil
	}
	return fmt.Errorf("--url %q: must be %s", access.Redact(e.url), form)
}

// look opens the files that the flags name, looks, and reports. A look that
// fails half-way has findings and an error.
func (e *examination) look(cmd *cobra.Command, with func(context.Context, *access.Access) ([]guard.Finding, error)) error {
	a, err := e.access.Open()
	if err != nil {
		return err
	}
	found, err := with(cmd.Context(), a)
	if err != nil && len(found) == 0 {
		return lookError{err} // not the same as nothing found
	}
	bad, printed := e.report(cmd.OutOrStdout(), found)
	if err = errors.Join(err, printed); err != nil {
		return lookError{err}
	}
	if bad {
		return errFound
	}
	return nil
}

// connectError says which broker was not reached, without user and password,
// which the client's error may repeat.
func connectError(address string, err error) error {
	return errors.New(access.Redact(fmt.Sprintf("connect to %s: %v", address, err)))
}

// report prints the findings, and tells whether one is as severe as --fail-on.
func (e *examination) report(w io.Writer, found []guard.Finding) (bad bool, err error) {
	for _, f := range found {
		bad = bad || slices.Index(severities(), severity(f.Severity.String())) >= slices.Index(severities(), e.failOn)
	}
	if e.json {
		if found == nil {
			found = []guard.Finding{}
		}
		return bad, json.NewEncoder(w).Encode(found)
	}
	if len(found) == 0 {
		_, err = fmt.Fprintln(w, "Nothing found.")
	}
	for _, f := range found {
		if err == nil {
			_, err = fmt.Fprintf(w, "%-7s  %s: %s\n         %s\n", f.Severity, f.Where, f.What, f.Fix)
		}
	}
	return bad, err
}
