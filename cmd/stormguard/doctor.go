// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"time"

	"github.com/spf13/cobra"

	"github.com/stormguard-mq/stormguard/guard"
)

const doctorLong = `Look for settings of a broker that would lose, repeat or delay messages of a
guarded consumer, and for what mends them. Nothing is changed.

A finding is one of

  danger   messages can be lost
  warning  duplicates, delays or a stall
  notice   worth knowing

They go to stdout: two lines each, or with --json one array of
{"severity","where","what","fix"}. The exit status is 1 if one is a danger.`

// errDanger makes the exit status 1; the findings say the rest.
var errDanger = errors.New("messages can be lost: see the findings marked danger")

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
	hold time.Duration
	json bool
}

func (e *examination) flags(cmd *cobra.Command) {
	e.hold = time.Hour
	e.duration(cmd.Flags(), &e.hold, "hold", time.Second, 8760*time.Hour, "the longest outage that must lose nothing")
	cmd.Flags().BoolVar(&e.json, "json", false, "print one JSON array")
}

// need reports which of the flags are unset.
func (e *examination) need(cmd *cobra.Command, names ...string) error {
	var errs []error
	if err := e.check(); err != nil {
		errs = append(errs, usageError{err})
	}
	for _, name := range names {
		if cmd.Flag(name).Value.String() == "" {
			errs = append(errs, usageError{fmt.Errorf("--%s: must be given", name)})
		}
	}
	return errors.Join(errs...)
}

var userinfo = regexp.MustCompile(`[^/,"]*@`)

// connectError says where nobody was found, without user and password, which
// the client's error may repeat.
func connectError(address string, err error) error {
	return errors.New(userinfo.ReplaceAllString(fmt.Sprintf("connect to %s: %v", address, err), "...@"))
}

// report prints the findings.
func (e *examination) report(w io.Writer, found []guard.Finding) error {
	var err error
	if e.json {
		if found == nil {
			found = []guard.Finding{}
		}
		err = json.NewEncoder(w).Encode(found)
	} else {
		if len(found) == 0 {
			_, err = fmt.Fprintln(w, "Nothing found.")
		}
		for _, f := range found {
			if err == nil {
				_, err = fmt.Fprintf(w, "%-7s  %s: %s\n         %s\n", f.Severity, f.Where, f.What, f.Fix)
			}
		}
	}
	for _, f := range found {
		if f.Severity == guard.Danger {
			return errors.Join(err, errDanger)
		}
	}
	return err
}
