// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package guard

import "fmt"

// A Severity says what a [Finding] costs.
type Severity uint8

// The severities.
const (
	Notice  Severity = iota // worth knowing
	Warning                 // costs duplicates, delay or a stall
	Danger                  // loses messages
)

// String is the severity in lower case.
func (s Severity) String() string {
	switch s {
	case Notice:
		return "notice"
	case Warning:
		return "warning"
	case Danger:
		return "danger"
	}
	return fmt.Sprintf("Severity(%d)", uint8(s))
}

// MarshalText is String, for JSON.
func (s Severity) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// A Finding is a setting of a broker or its client that works against a guarded
// consumer. Each adapter has an Inspect that looks for such settings of its broker.
type Finding struct {
	Severity Severity `json:"severity"`
	Where    string   `json:"where"` // what has the setting, such as "queue orders"
	What     string   `json:"what"`  // what is wrong, and what the effect is
	Fix      string   `json:"fix"`   // the command or setting that corrects it
}

// String is the finding in one line.
func (f Finding) String() string {
	return fmt.Sprintf("%s: %s: %s; %s", f.Severity, f.Where, f.What, f.Fix)
}
