// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
)

func newVersion() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), versionLine(debug.ReadBuildInfo()))
			return err
		},
	}
}

// versionLine formats the build information of the binary: a release's version after
// go install, the commit after go build in a clone.
func versionLine(info *debug.BuildInfo, ok bool) string {
	version := "(unknown)"
	if ok && info.Main.Version != "" {
		version = info.Main.Version
	}
	line := []string{"stormguard", version}
	if ok {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision":
				line = append(line, s.Value[:min(12, len(s.Value))])
			case s.Key == "vcs.modified" && s.Value == "true":
				line = append(line, "modified")
			}
		}
	}
	return strings.Join(append(line, runtime.Version(), runtime.GOOS+"/"+runtime.GOARCH), " ")
}

// programVersion is the version alone, of at most 64 bytes; empty without build
// information.
func programVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.Main.Version[:min(len(info.Main.Version), 64)]
	}
	return ""
}
