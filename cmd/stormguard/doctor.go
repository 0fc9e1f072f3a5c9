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

// errFound makes the exit status 1, after the findings were printed.
var errFound = errors.New("the settings need work: see the findings above")

// lookError makes the exit status 3: a look failed, so there may be more to find.
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

// examination holds the flags of all the doctor's commands.
type examination struct {
	ranges
	url    string
	hold   time.Duration
	failOn severity
	json   bool
	access access.Config
}

// severity is the text of a [guard.Severity], for a flag.
type severity string

func severities() []severity { return []severity{"notice", "warning", "danger"} }

func (e *examination) flags(cmd *cobra.Command) {
	e.hold, e.failOn = time.Hour, "warning"
	e.duration(cmd.Flags(), &e.hold, "hold", time.Second, 8760*time.Hour, "the longest outage that must lose no message")
	choice(&e.ranges, cmd.Flags(), &e.failOn, "fail-on", severities(), "the least severity that makes the exit status 1")
	cmd.Flags().BoolVar(&e.json, "json", false, "print one JSON array")
}

// need reports all flags out of range, and the named flags that are unset.
func (e *examination) need(cmd *cobra.Command, names ...string) error {
	err := e.check()
	for _, name := range names {
		if cmd.Flag(name).Value.String() == "" {
			err = errors.Join(err, fmt.Errorf("--%s: must be given", name))
		}
	}
	return err
}

// form reports a --url that does not have the form.
func (e *examination) form(ok bool, form string) error {
	if ok || e.url == "" { // need reports an empty --url
		return nil
	}
	return fmt.Errorf("--url %q: must be %s", access.Redact(e.url), form)
}

// look opens the files of the access flags, calls with, and reports the findings. If
// with fails half-way, it returns findings and an error.
func (e *examination) look(cmd *cobra.Command, with func(context.Context, *access.Access) ([]guard.Finding, error)) error {
	a, err := e.access.Open()
	if err != nil {
		return err
	}
	found, err := with(cmd.Context(), a)
	if err != nil && len(found) == 0 {
		return lookError{err} // must not print "Nothing found."
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

// connectError says which broker was not reached. It leaves out user and password,
// which the client's error may repeat.
func connectError(address string, err error) error {
	return errors.New(access.Redact(fmt.Sprintf("connect to %s: %v", address, err)))
}

// report prints the findings. bad is true if one of them is at least as severe as
// --fail-on.
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
