// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/stormguard-mq/stormguard/cmd/stormguard/internal/words"
)

// Settings for a command's target and its output have one name in three places. An example is
// --token-file on the command line, STORMGUARD_TOKEN_FILE in the environment, and token-file in
// the file of --config. The command line counts first, and the file last. Settings of a change
// are possible on the command line only.

// fillable are the flags that environment and file may set. The language is set separately.
var fillable = map[string]bool{
	"url": true, "token-file": true, "ca": true, "output": true, "json": true, "watch": true, "listen": true, "since": true, "by": true,
}

const (
	settingsFlag   = "config"
	settingsPrefix = "STORMGUARD_"
)

// settings adds the flag --config to a command. Before the command runs, environment and file
// fill in its flags.
func settings(cmd *cobra.Command) {
	cmd.Flags().String(settingsFlag, "", "YAML `file` with flags, such as \"url: https://billing-1:8790\"; the environment counts before it")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := fillIn(cmd); err != nil {
			return usageError{err}
		}
		return nil
	}
}

// variable is the name of a flag's environment variable.
func variable(flag string) string {
	return settingsPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// fillIn sets the flags that the command line does not set.
func fillIn(cmd *cobra.Command) error {
	flags := cmd.Flags()
	path, err := flags.GetString(settingsFlag)
	if err != nil {
		return err
	}
	if path == "" {
		path = os.Getenv(variable(settingsFlag))
	}
	file, err := readSettings(path, cmd.Root())
	if err != nil {
		return err
	}
	if text, ok := file[words.Flag]; ok && !flags.Changed(words.Flag) && os.Getenv(variable(words.Flag)) == "" {
		l, err := words.Asked([]string{"--" + words.Flag, text}, os.Getenv)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		cmd.SetContext(words.With(cmd.Context(), l))
	}
	var all []error
	places := map[string]string{} // where each flag was set, by flag
	flags.VisitAll(func(f *pflag.Flag) {
		switch text := os.Getenv(variable(f.Name)); {
		case f.Changed:
			places[f.Name] = "the command line"
		case !fillable[f.Name]:
		case text != "":
			places[f.Name] = "the environment"
			all = append(all, fill(flags, f, variable(f.Name), text))
		case file[f.Name] != "":
			places[f.Name] = path
			all = append(all, fill(flags, f, path+": "+f.Name, file[f.Name]))
		}
	})
	// A token from the environment or the file is only for the process whose URL comes from the
	// same place.
	if from := places["token-file"]; from != "" && from != "the command line" && places["url"] != from {
		all = append(all, fmt.Errorf("--token-file: that of %s is not for this --url, which is not from there: give both in one place", from))
	}
	return errors.Join(all...)
}

// fill sets a flag to the text of a place.
func fill(flags *pflag.FlagSet, f *pflag.Flag, place, text string) error {
	if err := flags.Set(f.Name, text); err != nil {
		return fmt.Errorf("%s %q: want a %s", place, text, f.Value.Type())
	}
	if r, ok := f.Value.(*ranged); ok && r.bad {
		r.bad = false // this error reports it, not check
		return fmt.Errorf("%s %q: must be %s", place, text, r.must)
	}
	return nil
}

// readSettings reads the file; without a path it returns no settings. A name that no command
// has is an error. A name of another command is allowed: all commands share one file.
func readSettings(path string, root *cobra.Command) (map[string]string, error) {
	file := make(map[string]string)
	if path == "" {
		return file, nil
	}
	text, err := os.ReadFile(path) //nolint:gosec // the operator's own
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", settingsFlag, err)
	}
	var read map[string]yaml.Node
	if err := yaml.Unmarshal(text, &read); errors.As(err, new(*yaml.TypeError)) { // the error's text repeats the file's contents
		return nil, fmt.Errorf("--%s %s: want lines such as \"url: https://billing-1:8790\"", settingsFlag, path)
	} else if err != nil {
		return nil, fmt.Errorf("--%s %s: %w", settingsFlag, path, err)
	}
	known := settable(root)
	for _, name := range slices.Sorted(maps.Keys(read)) {
		node := read[name]
		switch {
		case !known[name]:
			err = errors.Join(err, fmt.Errorf("--%s %s: %q cannot be set here", settingsFlag, path, name))
		case node.Kind != yaml.ScalarNode:
			err = errors.Join(err, fmt.Errorf("--%s %s: %s: want one value", settingsFlag, path, name))
		default:
			file[name] = node.Value
		}
	}
	return file, err
}

// settable returns the names of flags that a file may have.
func settable(cmd *cobra.Command) map[string]bool {
	names := map[string]bool{words.Flag: true}
	if cmd.Flags().Lookup(settingsFlag) != nil {
		cmd.Flags().VisitAll(func(f *pflag.Flag) { names[f.Name] = names[f.Name] || fillable[f.Name] })
	}
	for _, c := range cmd.Commands() {
		maps.Copy(names, settable(c))
	}
	return names
}
